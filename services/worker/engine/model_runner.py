"""Runs batches on a model: ints to tensors, forward, sampler, tokens back. Owns the KV tensors; knows no queue and no block's owner."""

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.host_cache import HostCache
from services.worker.engine.models.step import Step
from services.worker.engine.request import PositionLogprobs, SequenceError
from services.worker.engine.sampler import Sample, SampleRow, sample, score

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
    """A decoder, the cache that it reads and writes, and room in host memory for `host_blocks` of its blocks."""

    def __init__(self, model: Model[Cache], kv: Cache, host_blocks: int = 0) -> None:
        self.model = model
        self.kv = kv
        self.host = HostCache(kv.tensors, host_blocks)

    @torch.inference_mode()
    def copy(self, batch: Batch) -> None:
        """See Runner. Ends when the copies have, so that their time can be measured."""
        self.host.copy(batch.copies_out, batch.copies_in)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner. A span whose logits can't be used carries its error in its result."""
        logits = self._forward(batch)
        results = [SpanResult() for _ in batch.spans]
        row, sampling_rows = 0, []
        for span, result in zip(batch.spans, results, strict=True):
            if span.scored:
                _score(span, logits[row : row + len(span.scored)], result)
            row += len(span.scored)
            if span.samples:
                sampling_rows.append(row)
                row += 1
        sampling = [(span, result) for span, result in zip(batch.spans, results, strict=True) if span.samples]
        chosen = logits if len(sampling_rows) == len(logits) else logits[sampling_rows]
        samples = sample(chosen, [_sample_row(span) for span, _ in sampling])
        for (span, result), outcome in zip(sampling, samples, strict=True):
            _take(span, outcome, result)
        return results

    def _forward(self, batch: Batch) -> Tensor:
        """Logits [num_logit_positions, vocab] of all spans, in order."""
        tokens: list[int] = []
        logit_rows: list[int] = []
        for span in batch.spans:
            logit_rows += [len(tokens) + position - span.start for position in span.logit_positions]
            tokens += span.sequence.tokens[span.start : span.end]
        step = Step(
            tokens=tokens,
            query_lengths=[span.length for span in batch.spans],
            context_lengths=[span.end for span in batch.spans],
            block_tables=[span.sequence.block_table for span in batch.spans],
            logit_rows=logit_rows,
        )
        return self.model.forward(step, self.kv)


def _sample_row(span: Span) -> SampleRow:
    sequence = span.sequence
    allowed = None if sequence.grammar is None else sequence.grammar.masks()[0]
    return SampleRow(sequence.sampling, sequence.choice_index, sequence.tokens, sequence.num_prompt_tokens, sequence.banned_ids, allowed)


def _score(span: Span, logits: Tensor, result: SpanResult) -> None:
    sequence = span.sequence
    targets = sequence.tokens[span.scored.start + 1 : span.scored.stop + 1]
    count = sequence.sampling.prompt_logprobs or 0
    for start in range(0, len(targets), _SCORED_AT_ONCE):
        end = start + _SCORED_AT_ONCE
        result.prompt_logprobs += score(logits[start:end], targets[start:end], count)
    if any(_is_nan(position) for position in result.prompt_logprobs):
        result.error = SequenceError(sequence.request_id, sequence.choice_index, "the model's logits for the prompt are not numbers")


def _take(span: Span, outcome: Sample, result: SpanResult) -> None:
    if outcome.error is not None:
        sequence = span.sequence
        why = (outcome.unsatisfiable and sequence.grammar and sequence.grammar.error) or outcome.error
        result.error = SequenceError(sequence.request_id, sequence.choice_index, why, unsatisfiable=outcome.unsatisfiable)
        return
    result.token_ids.append(outcome.token_id)
    if outcome.logprobs is not None:
        result.logprobs.append(outcome.logprobs)


def _is_nan(position: PositionLogprobs) -> bool:
    return position.chosen.logprob != position.chosen.logprob
