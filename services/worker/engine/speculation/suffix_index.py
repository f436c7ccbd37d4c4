"""Where a text has said before what it says now: finds the longest earlier match of its end, and what followed there.

A hash chain as in LZ77: each position links to the previous one that ends in the same gram. Knows token ids, no sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 2  # tokens that must match at least
MAX_CANDIDATES = 16  # earlier places looked at, latest first: bounds the work per token
MAX_MATCH = 32  # tokens compared per place


@dataclass(frozen=True)
class Match:
    """An earlier place like the end of the text: `length` equal tokens, and the position of the token that followed."""

    follower: int
    length: int


class SuffixIndex:
    """Grows with its text; `extend` and `longest` cost O(1) per token."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}  # gram -> the position behind its latest occurrence
        self._earlier: list[int] = []  # position behind a gram -> that behind the gram's previous occurrence, 0 if none

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what `tokens` has beyond what is known. The gram at the very end stays out: nothing has followed it yet."""
        latest, earlier = self._latest, self._earlier
        earlier += [0] * (min(GRAM, len(tokens)) - len(earlier))
        for follower in range(len(earlier), len(tokens)):
            gram = tuple(tokens[follower - GRAM : follower])
            earlier.append(latest.get(gram, 0))
            latest[gram] = follower

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The longest match of the end of `tokens`, which `extend` knows; of equals the latest. None: its last gram is new."""
        end = len(tokens)
        follower = self._latest.get(tuple(tokens[-GRAM:]), 0)
        best, best_length = 0, 0
        for _ in range(MAX_CANDIDATES):
            if not follower:
                break
            length, limit = GRAM, min(MAX_MATCH, follower)
            # Unless it beats the best in the best's own length, its length is of no interest.
            if not best_length or (best_length < limit and tokens[follower - best_length - 1] == tokens[end - best_length - 1]):
                while length < limit and tokens[follower - length - 1] == tokens[end - length - 1]:
                    length += 1
                if length > best_length:
                    best, best_length = follower, length
                    if length == MAX_MATCH:
                        break
            follower = self._earlier[follower]
        return Match(best, best_length) if best else None


def continuation(tokens: Sequence[int], follower: int, count: int) -> tuple[int, ...]:
    """`count` tokens that go on as the text did from `follower`; where that reaches the end, it goes round."""
    period = len(tokens) - follower
    return tuple(tokens[follower + index % period] for index in range(count))
