"""A sequence: one choice of a request on its way through the engine. Pure data; the batcher and what it owns alone change it."""

from dataclasses import dataclass, field
from enum import Enum

from services.worker.engine.envelope import Envelope
from services.worker.engine.grammar import GrammarState
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams
from services.worker.engine.timeline import Event, Kind, Phase, Timeline

MAX_PREEMPTIONS = 5  # after as many a sequence waits for all the blocks it can ever need, and is never a victim again
FEW_TOKENS = 2  # a sequence that lacks no more has gone by the third step, in which whom it would give way to wants its first token


class SequenceState(Enum):
    """Where a sequence stands. Preemption takes it from RUNNING back to WAITING."""

    WAITING = 1  # holds no blocks
    RUNNING = 2
    FINISHED = 3  # holds no blocks


@dataclass(frozen=True)
class Swap:
    """What host memory keeps of a preempted sequence: the first `num_tokens` of it, whole, until they are all back.

    Blocks that others could find are found again by `keys`, on either tier; the host has promised to keep them. `slots` hold the rest.
    """

    num_tokens: int
    keys: dict[int, bytes]  # by index in the block table
    slots: dict[int, int]  # by index in the block table


@dataclass(eq=False)
class RequestState:
    """A live request: what was asked, what its choices share."""

    request: EngineRequest
    root_key: bytes  # parent of the first block's key
    prompt_keys: list[bytes]  # of the prompt's full blocks
    arrival: int = 0  # order of adding; a preempted sequence keeps its place by it
    sequences: list["Sequence"] = field(default_factory=list)
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when its first choice was admitted
    start_time: float | None = None  # when its first choice was admitted
    envelope: Envelope = field(default_factory=Envelope)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def live_sequences(self) -> list["Sequence"]:
        return [sequence for sequence in self.sequences if sequence.state is not SequenceState.FINISHED]


@dataclass(eq=False)
class Sequence:
    """Tokens, how many of them are computed, and the blocks that hold their keys and values."""

    group: RequestState
    choice_index: int
    tokens: list[int]  # prompt and output
    num_prompt_tokens: int
    max_output_tokens: int  # ends with LENGTH here; what max_tokens and the context leave
    stop_ids: frozenset[int]  # end tokens unless ignored, and stop_token_ids
    block_keys: list[bytes]  # of the leading full blocks; grows with them
    grammar: GrammarState | None = None
    scores_prompt: bool = False  # prompt log-probabilities are wanted from this choice
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_scored_tokens: int = 0  # leading prompt tokens whose log-probabilities are out
    num_preemptions: int = 0
    num_skips: int = 0  # steps that it has been left out of, one after another
    block_table: list[int] = field(default_factory=list)  # append-only while running
    swap: Swap | None = None  # from a preemption until all of it is back
    waiting_since: float | None = None  # when it began to wait, or to wait again; None: it runs, or nobody has looked yet
    waited_seconds: float = 0.0  # before that
    finish_reason: FinishReason | None = None
    phase: Phase = Phase.WAITING
    has_yielded: bool = False  # a token, here

    @property
    def request_id(self) -> str:
        return self.group.request.request_id

    @property
    def latency_class(self) -> int:
        """1 realtime, 2 standard, 3 batch."""
        return self.group.request.latency_class

    @property
    def sampling(self) -> SamplingParams:
        return self.group.request.sampling

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: class, then arrival, then choice. The greatest is the first victim."""
        return self.group.request.latency_class, self.group.arrival, self.choice_index

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what a worker has died of."""
        return self.num_output_tokens < self.group.request.suspect_tokens

    def banned_ids(self, num_drafts: int = 0) -> frozenset[int]:
        """Token ids that must not come next, behind so many drafts: what would end the choice before min_tokens."""
        return self.stop_ids if self.num_output_tokens + num_drafts < self.sampling.min_tokens else frozenset()

    @property
    def needs_scoring(self) -> bool:
        return self.scores_prompt and self.num_scored_tokens < self.num_prompt_tokens

    @property
    def max_computed_tokens(self) -> int:
        """Most tokens whose keys and values it will ever hold: the last output token's are never needed."""
        return self.num_prompt_tokens + max(self.max_output_tokens - 1, 0)

    @property
    def num_lacking_tokens(self) -> int:
        """To be computed before it can yield the next one; 1 while it decodes."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_about_to_finish(self) -> bool:
        """Whether it is out of the way before a preemption would have gained anything."""
        return self.num_lacking_tokens == 1 and self.max_output_tokens - self.num_output_tokens <= FEW_TOKENS

    def note(self, kind: Kind, now: float, num_tokens: int = 0, *, cached: int = 0, chunks: int = 0) -> None:
        """Writes into the request's timeline what has happened to this choice."""
        self.group.timeline.note(Event(kind, now, self.choice_index, num_tokens, cached, chunks))

    def enter(self, phase: Phase, now: float) -> None:
        """It is in another phase from now on."""
        self.group.timeline.move(self.phase, phase, now)
        self.phase = phase

    def waited(self, now: float) -> float:
        """Seconds that it has waited in all."""
        return self.waited_seconds + (0.0 if self.waiting_since is None else now - self.waiting_since)

    @property
    def is_reserved(self) -> bool:
        """Whether it holds blocks for all that it can ever have, as it was preempted too often."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def num_held_tokens(self) -> int:
        """Tokens that it has blocks for while it runs."""
        return self.max_computed_tokens if self.is_reserved else self.num_tokens

    @property
    def ending(self) -> FinishReason | None:
        """Why it ends behind its last token; None: it goes on."""
        enough = self.num_output_tokens > 0 and self.num_output_tokens >= self.sampling.min_tokens
        if enough and self.tokens[-1] in self.stop_ids:
            return FinishReason.STOP
        if self.grammar is not None and self.grammar.complete:
            return FinishReason.COMPLETE
        return FinishReason.LENGTH if self.num_output_tokens >= self.max_output_tokens else None
