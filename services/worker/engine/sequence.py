"""A sequence: one choice of a request on its way through the engine. Pure data; the batcher alone changes it."""

from dataclasses import dataclass, field
from enum import Enum

from services.worker.engine.grammar import GrammarState
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams


class SequenceState(Enum):
    """Where a sequence stands. Preemption takes it from RUNNING back to WAITING."""

    WAITING = 1  # holds no blocks
    RUNNING = 2
    FINISHED = 3  # holds no blocks


@dataclass(eq=False)
class RequestState:
    """A live request: what was asked, what its choices share."""

    request: EngineRequest
    arrival: int  # order of adding; a preempted sequence keeps its place by it
    root_key: bytes  # parent of the first block's key
    prompt_keys: list[bytes]  # of the prompt's full blocks
    sequences: list["Sequence"] = field(default_factory=list)
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when its first choice was admitted
    start_time: float | None = None  # when its first choice was admitted


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
    block_table: list[int] = field(default_factory=list)  # append-only while running
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.group.request.request_id

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
