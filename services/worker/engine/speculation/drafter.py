"""What guesses the next tokens of a sequence: the seam between the speculator and lookups, models, or whatever else drafts."""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from services.worker.engine.batch import Draft
from services.worker.engine.sequence import Sequence


class Outlook(NamedTuple):
    """What a drafter could say of a sequence's next tokens.

    Drafts of one grade come true about equally often, if those before them do: outcomes are counted by grade. `token_id` is the first
    draft where the drafter knows it for nothing; then it is judged by what comes even if it isn't verified.
    """

    grades: tuple[int, ...]  # of the first draft, of the next, ..., the last of all further ones; each indexes the drafter's `prior`
    token_id: int | None = None

    def grade(self, depth: int) -> int:
        """Of the draft behind `depth` others."""
        return self.grades[min(depth, len(self.grades) - 1)]


class Drafter(Protocol):
    """Guesses tokens. Called on the engine's thread, between steps."""

    @property
    def prior(self) -> Seq[float]:
        """By grade: the share of its drafts that come true, as long as nothing was measured."""
        ...

    @property
    def pass_seconds(self) -> float:
        """What one more draft for every sequence of a batch costs, its verification aside."""
        ...

    def outlook(self, sequence: Sequence) -> Outlook | None:
        """None: nothing to say, `draft` must not be called for it now."""
        ...

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Draft]:
        """At most as many tokens for each sequence. Its block table has room for them."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Idempotent."""
        ...
