"""Drafts from the sequence's own past, prompt and output: what followed the longest match of its end. Costs no model."""

from collections.abc import Sequence as Seq

from services.worker.engine.batch import Draft
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.drafter import Outlook
from services.worker.engine.speculation.suffix_index import Match, SuffixIndex, continuation

_GRADES = (2, 3, 4, 6, 9, 17)  # the shortest match of each grade


class SuffixDrafter:
    """Implements Drafter. An index per sequence, made when the sequence first asks."""

    prior = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    pass_seconds = 0.0

    def __init__(self) -> None:
        self._indexes: dict[Sequence, SuffixIndex] = {}
        self._matches: dict[Sequence, Match] = {}  # of the last outlook

    def outlook(self, sequence: Sequence) -> Outlook | None:
        """See Drafter. The longer the match, the surer."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = SuffixIndex()
        index.extend(sequence.tokens)
        match = index.longest(sequence.tokens)
        if match is None:
            return None
        self._matches[sequence] = match
        return Outlook(sum(match.length >= shortest for shortest in _GRADES) - 1, sequence.tokens[match.follower])

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Draft]:
        """See Drafter."""
        return [Draft(continuation(sequence.tokens, self._matches[sequence].follower, count)) for sequence, count in wanted]

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._indexes.pop(sequence, None)
        self._matches.pop(sequence, None)
