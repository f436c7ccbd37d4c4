"""What one step computes and what came of it: ints only, no tensors."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.worker.engine.request import PositionLogprobs, SequenceError
from services.worker.engine.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Guessed next tokens. `probabilities` [num_tokens, vocab] fp32 is what they were drawn from, for the rejection rule; None: certain."""

    token_ids: tuple[int, ...] = ()
    probabilities: "Tensor | None" = None


NO_DRAFT = Draft()


@dataclass(frozen=True)
class Span:
    """Tokens start .. start + length - 1 of one sequence with its draft behind it. The runner reads the sequence and never changes it.

    `scored` are the positions whose logits score the prompt token that follows them; `samples` says that the logits of the sequence's
    last token, and of each drafted token, yield the token that comes next there.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scored: range = range(0)
    draft: Draft = NO_DRAFT

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        """What to compute."""
        num_tokens = self.sequence.num_tokens
        drafted = self.draft.token_ids[max(0, self.start - num_tokens) : max(0, self.end - num_tokens)]
        return [*self.sequence.tokens[self.start : self.end], *drafted]

    @cached_property  # which is asked for again and again
    def sampled(self) -> range:
        """Positions whose logits yield a token: the sequence's last, and those of its draft."""
        return range(max(self.start, self.sequence.num_tokens - 1), self.end) if self.samples else range(0)

    @property
    def may_draft(self) -> bool:
        """True where drafts behind its one token would be verified at once."""
        return self.samples and self.length == 1 and self.sequence.sampling.speculation

    @property
    def logit_positions(self) -> list[int]:
        """Positions that need logits, in order: those scored, then those sampled."""
        return [*self.scored, *self.sampled]


class Copy(NamedTuple):
    """One page between a block of the device and a slot of the host; the list that it is in says which way."""

    block: int
    slot: int


@dataclass(frozen=True)
class Batch:
    """The spans of one step, at most one per sequence, and the copies before it. No spans when no sequence has anything to compute yet.

    Copies out save what blocks held before this step; copies in may read what those have just written. No target is named twice.
    """

    spans: tuple[Span, ...]
    copies_out: tuple[Copy, ...] = ()
    copies_in: tuple[Copy, ...] = ()
    draft_counts: tuple[int, ...] = ()  # by span: drafts that it has slots for, and may get before it runs; empty: none

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def num_copies(self) -> int:
        return len(self.copies_out) + len(self.copies_in)

    def without(self, request_id: str) -> "Batch":
        """The batch less the spans of one request."""
        return replace(self, spans=tuple(span for span in self.spans if span.sequence.request_id != request_id))


@dataclass
class SpanResult:
    """What a span yielded: no token, or the accepted draft and one more; log-probabilities as asked for; or why it can't go on."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    probabilities: "Tensor | None" = None  # [1, vocab] fp32, from a runner that drafts for the rejection rule: what it drew from
    error: SequenceError | None = None


class Runner(Protocol):
    """Computes batches: the model, or a stand-in that needs none."""

    def copy(self, batch: Batch) -> None:
        """Runs the batch's copies, those out first. Once per batch and before `execute`, whatever becomes of the spans."""
        ...

    def execute(self, batch: Batch) -> list[SpanResult]:
        """One result per span, in order. A SequenceError raised costs one request, anything else the engine; a batch may be run again."""
        ...
