"""How often drafts come true, by sequence and grade: what a sequence's own few outcomes say, leaning on what all sequences' say."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.worker.engine.sequence import Sequence

_OWN_MEMORY = 0.96  # a sequence's outcomes: about the last twenty-five
_SHARED_MEMORY = 0.998  # everybody's: about the last five hundred
_OWN_PRIOR_WEIGHT = 4.0  # outcomes that everybody's count as
_SHARED_PRIOR_WEIGHT = 8.0


@dataclass
class Tally:
    """Outcomes, the latest counting most."""

    accepted: float = 0.0
    judged: float = 0.0

    def add(self, accepted: bool, memory: float) -> None:
        """One outcome."""
        self.accepted = self.accepted * memory + accepted
        self.judged = self.judged * memory + 1

    def rate(self, prior: float, weight: float) -> float:
        """The share of hits to expect next; what is known beforehand counts as `weight` outcomes."""
        return (self.accepted + weight * prior) / (self.judged + weight)


class Acceptance:
    """Tallies of all sequences, and of each. `prior` is the share to expect of each grade before anything was seen."""

    def __init__(self, prior: Seq[float]) -> None:
        self._prior = tuple(prior)
        self._shared = [Tally() for _ in prior]
        self._own: dict[Sequence, dict[int, Tally]] = {}

    def chance(self, sequence: Sequence, grade: int) -> float:
        """That the next draft of this grade comes true."""
        shared = self._shared[grade].rate(self._prior[grade], _SHARED_PRIOR_WEIGHT)
        own = self._own.get(sequence, {}).get(grade)
        return shared if own is None else own.rate(shared, _OWN_PRIOR_WEIGHT)

    def record(self, sequence: Sequence, grade: int, accepted: bool) -> None:
        """What became of a draft of this grade. What comes behind a miss says nothing and isn't recorded."""
        self._shared[grade].add(accepted, _SHARED_MEMORY)
        self._own.setdefault(sequence, {}).setdefault(grade, Tally()).add(accepted, _OWN_MEMORY)

    def forget(self, sequence: Sequence) -> None:
        """Drops the sequence's own tallies; what they taught all stays. Idempotent."""
        self._own.pop(sequence, None)
