"""Drafts by a second decoder over the target's own cache: a lower level of the same weights, say.

It reads the keys and values of the target, writes its own for the last token and the drafts, and the verification overwrites those. With
the target's noise (the same sampler, seed and position) it draws what the target would, as far as it knows what that is.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.worker.engine.batch import Batch, Draft, Runner, Span, SpanResult
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.drafter import Outlook

_PACE_MEMORY = 0.9


class ModelDrafter:
    """Implements Drafter on any Runner whose blocks are the target's. `clock` times its passes, in seconds."""

    prior = (0.7,)

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self.pass_seconds = 0.0

    def outlook(self, sequence: Sequence) -> Outlook | None:  # noqa: ARG002  # whichever it is
        """See Drafter: a model always has something to say."""
        return Outlook(grades=(0,))

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Draft]:
        """See Drafter. One pass over the batch per token, for those sequences that still want one."""
        growing = [_Growing(sequence, count) for sequence, count in wanted]
        while active := [draft for draft in growing if len(draft.token_ids) < draft.count]:
            started = self._clock()
            results = self._runner.execute(Batch(tuple(draft.next_span() for draft in active)))
            for draft, result in zip(active, results, strict=True):
                draft.take(result)
            self._measure(self._clock() - started)
        return [Draft(tuple(draft.token_ids), torch.cat(draft.probabilities) if draft.probabilities else None) for draft in growing]

    def forget(self, sequence: Sequence) -> None:
        """See Drafter: there is nothing to forget, the cache is the target's."""

    def _measure(self, seconds: float) -> None:
        self.pass_seconds = self.pass_seconds * _PACE_MEMORY + seconds * (1 - _PACE_MEMORY) if self.pass_seconds else seconds


@dataclass
class _Growing:
    """A draft in the making."""

    sequence: Sequence
    count: int  # tokens wanted
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)  # [1, vocab] each, where the runner tells

    def next_span(self) -> Span:
        """The one token that the draft model computes next: the last of the sequence, or of its draft."""
        start = self.sequence.num_tokens - 1 + len(self.token_ids)
        return Span(self.sequence, start, 1, samples=True, draft=Draft(tuple(self.token_ids)))

    def take(self, result: SpanResult) -> None:
        """One token more; an error ends the draft, for the target will say itself what is wrong."""
        if result.error is not None:
            self.count = len(self.token_ids)
            return
        self.token_ids += result.token_ids
        if result.probabilities is not None:
            self.probabilities.append(result.probabilities)
