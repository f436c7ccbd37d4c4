"""Runs batches on a model: ints to tensors, forward, sampler, tokens back. Owns the KV tensors; knows no queue and no block's owner."""

from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.host_cache import HostCache
from services.worker.engine.models.step import Step
from services.worker.engine.request import PositionLogprobs, SequenceError
from services.worker.engine.sampler import sample, score
from services.worker.engine.verification import GumbelRule, Rule, sample_rows, take_run

_SCORED_AT_ONCE = 64  # rows of log-softmax beside the logits


class Paged(Protocol):
    """A cache in blocks, of any layout."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that blocks consist of; the first dimension of each is the block."""
        ...


Cache = TypeVar("Cache", bound=Paged)
_Cache = TypeVar("_Cache", contravariant=True)


class Model(Protocol[_Cache]):
    """A decoder in torch or in C++, each with a cache of its own layout."""

    def forward(self, step: Step, kv: _Cache) -> Tensor:
        """Logits [num_logit_rows, vocab] fp32."""
        ...


class ModelRunner(Generic[Cache]):
    """A decoder, the cache that it reads and writes, and room in host memory for `num_host_slots` of its blocks."""

    def __init__(self, model: Model[Cache], kv: Cache, num_host_slots: int = 0, rule: type[Rule] = GumbelRule) -> None:
        """`rule` chooses tokens: see verification."""
        self.model = model
        self.kv = kv
        self._rule = rule
        self.host = HostCache(kv.tensors, num_host_slots)

    @torch.inference_mode()
    def copy(self, batch: Batch) -> None:
        """See Runner. Ends when the copies have, so that their time can be measured."""
        self.host.copy(batch.copies_out, batch.copies_in)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner. A span whose logits can't be used carries its error in its result."""
        logits = self._forward(batch)
        results = [SpanResult() for _ in batch.spans]
        row = 0
        sampled: list[int] = []  # rows of the logits
        for span, result in zip(batch.spans, results, strict=True):
            if span.scored:
                _score(span, logits[row : row + len(span.scored)], result)
            row += len(span.scored)
            sampled += range(row, row + len(span.sampled))
            row += len(span.sampled)
        sampling = [(span, result) for span, result in zip(batch.spans, results, strict=True) if span.samples]
        rows = [sample_row for span, _ in sampling for sample_row in sample_rows(span)]
        rule = self._rule([span for span, _ in sampling])
        samples = iter(sample(logits if len(sampled) == len(logits) else logits[sampled], rows, rule.choose))
        for span, result in sampling:
            take_run(span, list(islice(samples, len(span.sampled))), result)
        rule.annotate([result for _, result in sampling])
        return results

    def _forward(self, batch: Batch) -> Tensor:
        """Logits [num_logit_positions, vocab] of all spans, in order."""
        tokens: list[int] = []
        logit_rows: list[int] = []
        for span in batch.spans:
            logit_rows += [len(tokens) + position - span.start for position in span.logit_positions]
            tokens += span.token_ids
        step = Step(
            tokens=tokens,
            query_lengths=[span.length for span in batch.spans],
            context_lengths=[span.end for span in batch.spans],
            block_tables=[span.sequence.block_table for span in batch.spans],
            logit_rows=logit_rows,
        )
        return self.model.forward(step, self.kv)


def _score(span: Span, logits: Tensor, result: SpanResult) -> None:
    sequence = span.sequence
    targets = sequence.tokens[span.scored.start + 1 : span.scored.stop + 1]
    count = sequence.sampling.prompt_logprobs or 0
    for start in range(0, len(targets), _SCORED_AT_ONCE):
        end = start + _SCORED_AT_ONCE
        result.prompt_logprobs += score(logits[start:end], targets[start:end], count)
    if any(_is_nan(position) for position in result.prompt_logprobs):
        result.error = SequenceError(sequence.request_id, sequence.choice_index, "the model's logits for the prompt are not numbers")


def _is_nan(position: PositionLogprobs) -> bool:
    return position.chosen.logprob != position.chosen.logprob
