"""What a step may still compute, in tokens and in seconds by the fitted step time. Pure."""

import math
from dataclasses import dataclass

from services.worker.engine.batch import Span
from services.worker.engine.sequence import Sequence
from services.worker.engine.step_time import Load, StepTime

LEAST_CHUNK = 16  # tokens of a prompt: what is less isn't worth its place in a step


@dataclass
class Budget:
    """Tokens, and prompt positions whose logits are looked at. Spent by one sequence after another."""

    tokens: int
    scored_rows: int
    step_time: StepTime

    def __post_init__(self) -> None:
        self._most = self.tokens
        self._num_tokens = self._num_rows = self._num_keys = 0  # that are spent

    def spend(self, sequence: Sequence, kept_back: float = 0.0, limit_seconds: float = math.inf, *, must: bool = False) -> Span | None:
        """As long a span of the sequence as the budget allows, None if it allows nothing worth the while.

        `kept_back` is the part of all the step's tokens that it leaves. With it the step takes no longer than `limit_seconds`, unless it
        `must` be in.
        """
        start = sequence.num_computed_tokens
        length = min(sequence.num_tokens - start, self.tokens - math.ceil(kept_back * self._most))
        if length > 0 and limit_seconds < math.inf:
            affordable, least = self._affordable(start, limit_seconds), min(length, LEAST_CHUNK)
            if affordable < least and not must:
                return None
            length = min(length, max(affordable, least))
        scored = range(0)
        if sequence.needs_scoring:
            # Position p scores prompt token p + 1, so the first one to compute is the last one scored.
            first = max(start, sequence.num_scored_tokens - 1)
            length = min(length, first - start + self.scored_rows)
            scored = range(first, min(start + length, sequence.num_prompt_tokens - 1))
            self.scored_rows -= len(scored)
        if length <= 0:
            return None
        self.tokens -= length
        samples = start + length == sequence.num_tokens and sequence.finish_reason is None
        self._num_tokens += length
        self._num_rows += len(scored) + samples
        self._num_keys += start + length
        return Span(sequence, start, length, samples, scored)

    def _affordable(self, start: int, limit_seconds: float) -> int:
        """Tokens from there on that end in time, the last of them with logits."""
        left = limit_seconds - self.step_time.seconds(Load(self._num_tokens, self._num_rows + 1, self._num_keys + start))
        token_seconds = self.step_time.token_seconds()
        if left <= 0:
            return 0
        return int(left / token_seconds) if token_seconds * self.tokens > left else self.tokens
