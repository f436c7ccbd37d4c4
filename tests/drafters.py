"""Speculators for tests: drafts of a set length whatever they cost, by drafters that are right, wrong, or both by turns."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from services.worker.engine.batch import Draft
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.drafter import Drafter, Outlook
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.speculation.suffix_drafter import SuffixDrafter
from services.worker.engine.step_time import Load, StepTime
from tests.fake_runner import VOCAB_SIZE, next_token


class FreeDrafts(StepTime):
    """Steps for which a draft costs nothing, so that as many are made as there is room for."""

    known = True

    def seconds(self, load: Load) -> float:
        return 1.0

    def draft_seconds(self) -> float:
        return 0.0

    def drafting_seconds(self) -> float:
        return -0.5  # even a hopeless draft seems to pay


def always(max_drafts: int, drafter: Drafter | None = None) -> Speculator:
    """Drafts all it can, by default what the text itself has said before."""
    return Speculator(drafter or SuffixDrafter(), max_drafts, FreeDrafts())


class Guesser:
    """Drafts by a function of the sequence and the number of drafts already made."""

    pass_seconds = 0.0

    def __init__(
        self, guess: Callable[[Sequence, tuple[int, ...]], int], grades: tuple[int, ...] = (0,), prior: tuple[float, ...] = (0.5,)
    ) -> None:
        self.prior = prior
        self._guess = guess
        self._grades = grades
        self.live: set[Sequence] = set()

    def outlook(self, sequence: Sequence) -> Outlook | None:
        self.live.add(sequence)
        return Outlook(self._grades)

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Draft]:
        return [Draft(self._grow(sequence, count)) for sequence, count in wanted]

    def _grow(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        drafted: tuple[int, ...] = ()
        for _ in range(count):
            drafted += (self._guess(sequence, drafted),)
        return drafted

    def forget(self, sequence: Sequence) -> None:
        self.live.discard(sequence)


def fake_runners_token(sequence: Sequence, drafted: tuple[int, ...]) -> int:
    """What a FakeRunner is going to say: every draft right."""
    return next_token(array("i", [*sequence.tokens, *drafted]), sequence, VOCAB_SIZE, num_drafts=len(drafted))


def often_right(sequence: Sequence, drafted: tuple[int, ...]) -> int:
    """Wrong at every third token or so."""
    token = fake_runners_token(sequence, drafted)
    return token if (token + len(drafted)) % 3 else (token + 1) % VOCAB_SIZE
