"""Where a text has said before what it says now: finds the longest earlier match of its end, and what followed there.

Hash chains as in LZ77: each position links to the previous one that ends in the same gram. Knows token ids, no sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GRAMS = (2, 1)  # tokens that must match at least; a shorter gram is looked for where a longer one is new
MAX_CANDIDATES = 16  # earlier places looked at, latest first: bounds the work per token
MAX_MATCH = 32  # tokens compared per place


@dataclass(frozen=True)
class Match:
    """An earlier place like the end of the text: `length` equal tokens, and the position of the token that followed.

    `support` counts the places with as long a match, 0 if not all of them went on with the same token.
    """

    follower: int
    length: int
    support: int = 1


class SuffixIndex:
    """Grows with its text; `extend` and `longest` cost O(1) per token."""

    def __init__(self) -> None:
        self._chains = [_Chain(gram) for gram in GRAMS]

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what `tokens` has beyond what is known. The gram at the very end stays out: nothing has followed it yet."""
        for chain in self._chains:
            chain.extend(tokens)

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The longest match of the end of `tokens`, which `extend` knows; of equals the latest. None: its last token is new."""
        for chain in self._chains:
            if (match := chain.longest(tokens)) is not None:
                return match
        return None


class _Chain:
    """The places where each gram of one length occurred."""

    def __init__(self, gram: int) -> None:
        self._gram = gram
        self._latest: dict[tuple[int, ...], int] = {}  # gram -> the position behind its latest occurrence
        self._earlier: list[int] = []  # position behind a gram -> that behind the gram's previous occurrence, 0 if none

    def extend(self, tokens: Sequence[int]) -> None:
        gram, latest, earlier = self._gram, self._latest, self._earlier
        earlier += [0] * (min(gram, len(tokens)) - len(earlier))
        for follower in range(len(earlier), len(tokens)):
            key = tuple(tokens[follower - gram : follower])
            earlier.append(latest.get(key, 0))
            latest[key] = follower

    def longest(self, tokens: Sequence[int]) -> Match | None:
        follower = self._latest.get(tuple(tokens[-self._gram :]), 0)
        best, best_length, support = 0, 0, 0
        for _ in range(MAX_CANDIDATES):
            if not follower:
                break
            length = _common_length(tokens, follower, self._gram, best_length)
            if length > best_length:
                best, best_length, support = follower, length, 1
            elif length == best_length and support:
                support = support + 1 if tokens[follower] == tokens[best] else 0
            if best_length == MAX_MATCH and support > 1:
                break  # as sure as can be
            follower = self._earlier[follower]
        return Match(best, best_length, support) if best else None


def _common_length(tokens: Sequence[int], follower: int, least: int, interesting: int) -> int:
    """How many tokens before `follower` equal the last ones, at most MAX_MATCH; `least` do. 0 where it is less than `interesting`."""
    end, limit = len(tokens), min(MAX_MATCH, follower)
    if interesting and (limit < interesting or tokens[follower - interesting] != tokens[end - interesting]):
        return 0
    length = least
    while length < limit and tokens[follower - length - 1] == tokens[end - length - 1]:
        length += 1
    return length


def continuation(tokens: Sequence[int], follower: int, count: int) -> tuple[int, ...]:
    """`count` tokens that go on as the text did from `follower`; where that reaches the end, it goes round."""
    period = len(tokens) - follower
    return tuple(tokens[follower + index % period] for index in range(count))
