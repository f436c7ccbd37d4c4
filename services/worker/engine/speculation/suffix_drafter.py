"""Drafts from the sequence's own past, prompt and output: what followed the longest match of its end. Costs no model."""

from collections.abc import Sequence as Seq

from services.worker.engine.batch import Draft
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.drafter import Outlook
from services.worker.engine.speculation.suffix_index import MAX_MATCH, Match, SuffixIndex, continuation

# Grades: 0 where equal places went on differently; then by the length of a match that is there once; then of one that is there again.
_ONCE = (1, 2, 3, 5, 9, 17)  # the shortest match of each grade
_AGAIN = (1, 3)
_PRIOR = (0.1, *(0.25, 0.4, 0.65, 0.75, 0.85, 0.9), *(0.7, 0.9))


def _grade(length: int, support: int) -> int:
    if support == 0:
        return 0
    shortest, first = (_ONCE, 1) if support == 1 else (_AGAIN, 1 + len(_ONCE))
    return first + sum(length >= least for least in shortest) - 1


# By support and length: the grade of the first draft and of those behind it, each of which has one more token before it.
_GRADES = [
    [tuple(_grade(length + depth, support) for depth in range(_ONCE[-1])) for length in range(MAX_MATCH + 1)] for support in range(3)
]


class SuffixDrafter:
    """Implements Drafter. An index per sequence, made when the sequence first asks."""

    prior = _PRIOR
    pass_seconds = 0.0

    def __init__(self) -> None:
        self._indexes: dict[Sequence, SuffixIndex] = {}
        self._matches: dict[Sequence, Match] = {}  # of the last outlook

    def outlook(self, sequence: Sequence) -> Outlook | None:
        """See Drafter. The longer the match and the more often it is there, the surer."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = SuffixIndex()
        index.extend(sequence.tokens)
        match = index.longest(sequence.tokens)
        if match is None:
            return None
        self._matches[sequence] = match
        return Outlook(_GRADES[match.support][match.length], sequence.tokens[match.follower])

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Draft]:
        """See Drafter."""
        return [Draft(continuation(sequence.tokens, self._matches[sequence].follower, count)) for sequence, count in wanted]

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._indexes.pop(sequence, None)
        self._matches.pop(sequence, None)
