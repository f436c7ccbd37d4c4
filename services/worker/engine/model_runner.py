"""Runs batches on a model: ints to tensors, forward, sampler, tokens back. Owns the KV tensors; knows no queue and no block's owner."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.engine.attention import AttentionMetadata
from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.kv_cache import KVCache
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.request import PositionLogprobs, SequenceError
from services.worker.engine.sampler import Sample, SampleRow, sample, score

_SCORED_AT_ONCE = 64  # rows of log-softmax beside the logits


class ModelRunner:
    """A decoder and the cache that it reads and writes."""

    def __init__(self, model: Decoder, kv: KVCache) -> None:
        self.model = model
        self.kv = kv

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
        device = self.model.device
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for span in batch.spans:
            logit_rows += [len(tokens) + position - span.start for position in span.logit_positions]
            tokens += span.sequence.tokens[span.start : span.end]
            positions += range(span.start, span.end)
        attention = AttentionMetadata.build(
            [span.length for span in batch.spans],
            [span.end for span in batch.spans],
            [span.sequence.block_table for span in batch.spans],
            self.kv.block_size,
            device,
        )
        return self.model.forward(_ints(tokens, device), _ints(positions, device), self.kv, attention, _ints(logit_rows, device))


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


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
