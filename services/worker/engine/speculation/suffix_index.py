"""Where a text has said before what it says now: finds the longest earlier match of its end, and what followed there.

A hash chain as in LZ77: each position links to the previous one that ends in the same gram. Knows token ids, no sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

GRAM = 2  # tokens of the chains' grams; where the last gram is new, the last token alone is looked for
MAX_CANDIDATES = 16  # earlier places looked at, latest first: bounds the work per token
MAX_MATCH = 32  # tokens compared per place


class Match(NamedTuple):
    """An earlier place like the end of the text: `length` equal tokens, and the position of the token that followed.

    `support` says how many such places in a row went on with that token, at most 2; 0 where the one before it didn't.
    """

    follower: int
    length: int
    support: int


class SuffixIndex:
    """Grows with its text; `extend` and `longest` cost O(1) per token."""

    def __init__(self) -> None:
        # Ints in ints: the garbage collector never looks at them.
        self._latest: dict[int, int] = {}  # gram -> the position behind its latest occurrence
        self._earlier: list[int] = []  # position behind a gram -> that behind the gram's previous occurrence, 0 if none
        self._single: dict[int, int] = {}  # token -> the position behind its latest occurrence
        self._support: dict[int, int] = {}  # token -> see Match

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what `tokens` has beyond what is known. The gram at the very end stays out: nothing has followed it yet."""
        single, latest, earlier = self._single, self._latest, self._earlier
        if not earlier and tokens:
            earlier.append(0)
        for follower in range(len(earlier), len(tokens)):
            last = tokens[follower - 1]
            before = single.get(last, 0)
            self._support[last] = 1 if not before else 2 if tokens[before] == tokens[follower] else 0
            single[last] = follower
            gram = _gram(tokens, follower)
            earlier.append(latest.get(gram, 0))
            latest[gram] = follower

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The longest match of the end of `tokens`, which `extend` knows; of equals the latest. None: its last token is new."""
        end = len(tokens)
        if not end or not (follower := self._single.get(tokens[-1], 0)):
            return None
        if not (chained := self._latest.get(_gram(tokens, end), 0)):
            return Match(follower, 1, self._support[tokens[-1]])
        return self._longest(tokens, chained)

    def _longest(self, tokens: Sequence[int], follower: int) -> Match:
        """Of the places in the chain that begins at `follower`."""
        end = len(tokens)
        best, best_length, support = 0, 0, 0
        for _ in range(MAX_CANDIDATES):
            length, limit = GRAM, min(MAX_MATCH, follower)
            # Unless it equals the best in the best's own length, its length is of no interest.
            if not best_length or (best_length <= limit and tokens[follower - best_length] == tokens[end - best_length]):
                while length < limit and tokens[follower - length - 1] == tokens[end - length - 1]:
                    length += 1
                if length > best_length:
                    best, best_length, support = follower, length, 1
                elif length == best_length and support == 1:
                    support = 2 if tokens[follower] == tokens[best] else 0
            follower = self._earlier[follower]
            if not follower or (best_length == MAX_MATCH and support != 1):
                break
        return Match(best, best_length, support)


def _gram(tokens: Sequence[int], follower: int) -> int:
    """The two tokens before a position, in one number; at position 1, where there is but one, a number that no gram is."""
    return tokens[follower - 2] << 32 | tokens[follower - 1] if follower > 1 else -1


def continuation(tokens: Sequence[int], follower: int, count: int) -> tuple[int, ...]:
    """`count` tokens that go on as the text did from `follower`; where that reaches the end, it goes round."""
    period = len(tokens) - follower
    return tuple(tokens[follower + index % period] for index in range(count))
