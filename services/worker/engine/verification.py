"""What becomes of a draft: the target's own tokens beside it, and how long the run of equals is.

A rule chooses the target's tokens. The Gumbel rule takes what would come without a draft; the rejection rule takes the draft where it is
likely enough. `accept`, `residual` and `draw` are pure and work on any leading shape.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.worker.engine.batch import Span, SpanResult
from services.worker.engine.config import Verification
from services.worker.engine.noise import gumbel
from services.worker.engine.request import SequenceError
from services.worker.engine.sampler import Peaks, Sample, SampleRow, distribution, loudest, noise_key_columns

# Noise beside that of the tokens themselves: what decides must not depend on what it decides about.
_DRAFT_STREAM, _ACCEPT_STREAM, _RESIDUAL_STREAM = 1, 2, 3


def sample_rows(span: Span) -> list[SampleRow]:
    """What the sampler must know of each sampled position of a span: the sequence, with the draft up to there."""
    sequence = span.sequence
    masks = None if sequence.grammar is None else sequence.grammar.masks(span.draft.token_ids)
    rows = []
    for position in span.sampled:
        drafted = span.draft.token_ids[: position + 1 - sequence.num_tokens]
        tokens = [*sequence.tokens, *drafted] if drafted else sequence.tokens
        banned = sequence.banned_ids(len(drafted))
        allowed = None if masks is None else masks[len(drafted)]
        rows.append(SampleRow(sequence.sampling, sequence.choice_index, tokens, sequence.num_prompt_tokens, banned, allowed))
    return rows


def take_run(span: Span, samples: Sequence[Sample], result: SpanResult) -> None:
    """Puts into the result the samples up to the first that isn't the draft: behind that, they continue another text.

    An error behind accepted tokens waits for the step that meets it first.
    """
    first = samples[0]
    if first.error is not None:
        sequence = span.sequence
        why = (first.unsatisfiable and sequence.grammar and sequence.grammar.error) or first.error
        result.error = SequenceError(sequence.request_id, sequence.choice_index, why, unsatisfiable=first.unsatisfiable)
        return
    verified = span.draft.token_ids[len(span.draft.token_ids) + 1 - len(samples) :]
    for index, sample in enumerate(samples):
        if sample.error is not None:
            return
        result.token_ids.append(sample.token_id)
        if sample.logprobs is not None:
            result.logprobs.append(sample.logprobs)
        if index < len(verified) and sample.token_id != verified[index]:
            return


# --- rules


class Rule(Protocol):
    """Made for the sampling spans of one step."""

    def __init__(self, spans: Sequence[Span]) -> None: ...

    def choose(self, logits: Tensor, peaks: Peaks, rows: Sequence[SampleRow]) -> list[int]:
        """See sampler.Choose; the rows are the sample_rows of the spans."""
        ...

    def annotate(self, results: Sequence[SpanResult]) -> None:
        """Adds to the spans' results what whoever uses them must know besides."""
        ...


class GumbelRule:
    """Tokens by the noise of their own position."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """What they were drafted from plays no part."""

    def choose(self, logits: Tensor, peaks: Peaks, rows: Sequence[SampleRow]) -> list[int]:
        """See Rule."""
        return loudest(logits, peaks, rows)

    def annotate(self, results: Sequence[SpanResult]) -> None:
        """See Rule: there is nothing to add."""


class RejectionRule:
    """The draft with probability min(1, p / q), else a token of max(p - q, 0); greedy rows and those without a draft as ever."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def choose(self, logits: Tensor, peaks: Peaks, rows: Sequence[SampleRow]) -> list[int]:
        """See Rule. Behind a refused draft, rows hold tokens that nobody takes."""
        tokens = loudest(logits, peaks, rows)
        verified, places = [], []  # spans, and the rows of their drafts
        start = 0
        for span in self._spans:
            if span.draft.token_ids and span.sequence.sampling.temperature > 0:
                verified.append(span)
                places.append(range(start, start + len(span.draft.token_ids)))
            start += len(span.sampled)
        if verified:
            flat = [row for part in places for row in part]
            target = distribution(logits[flat], peaks.logits[flat], [rows[row] for row in flat])
            chosen = self._verify(target, [rows[row] for row in flat], verified)
            for row, token in zip(flat, chosen, strict=True):
                tokens[row] = token
        return tokens

    def _verify(self, target: Tensor, rows: Sequence[SampleRow], spans: Sequence[Span]) -> list[int]:
        """The drafts of the spans, but for the first of each that is refused: another token there. `target` is [num_drafts, vocab]."""
        device = target.device
        drafted = torch.tensor([token for span in spans for token in span.draft.token_ids], device=device)
        draft = torch.cat([_drawn_from(span, target) for span in spans])
        # The noise of one token id is as good as a number from (0, 1): exp(-exp(-g)) gives back what it was made of.
        noise = gumbel(torch.zeros(1, dtype=torch.int32, device=device), noise_key_columns(rows, device, _ACCEPT_STREAM))
        tokens: list[int] = drafted.tolist()
        refused, start = [], 0
        accepted = accept(target, draft, drafted, noise.neg().exp().neg().exp()).tolist()
        for span in spans:
            end = start + len(span.draft.token_ids)
            refused += [row for row in range(start, end) if not accepted[row]][:1]
            start = end
        instead = draw(residual(target[refused], draft[refused]), noise_key_columns([rows[i] for i in refused], device, _RESIDUAL_STREAM))
        for row, token in zip(refused, instead.tolist(), strict=True):
            tokens[row] = token
        return tokens

    def annotate(self, results: Sequence[SpanResult]) -> None:
        """See Rule: there is nothing to add."""


class DraftingRule:
    """For the runner of a draft model under the rejection rule: tokens drawn from what it tells, by noise of their own."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._drawn_from: list[Tensor | None] = [None] * len(spans)

    def choose(self, logits: Tensor, peaks: Peaks, rows: Sequence[SampleRow]) -> list[int]:
        """See Rule. One row per span: it drafts."""
        tokens = list(peaks.token_ids)
        random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
        if not random:
            return tokens
        probabilities = distribution(logits[random], peaks.logits[random], [rows[index] for index in random])
        drawn = draw(probabilities, noise_key_columns([rows[index] for index in random], logits.device, _DRAFT_STREAM)).tolist()
        for place, index in enumerate(random):
            tokens[index] = drawn[place]
            self._drawn_from[index] = probabilities[place : place + 1]
        return tokens

    def annotate(self, results: Sequence[SpanResult]) -> None:
        """See Rule: the distributions."""
        for result, probabilities in zip(results, self._drawn_from, strict=True):
            result.probabilities = probabilities


def _drawn_from(span: Span, like: Tensor) -> Tensor:
    """[num_drafts, vocab]"""
    if span.draft.probabilities is not None:
        return span.draft.probabilities
    token_ids = torch.tensor(span.draft.token_ids, device=like.device)
    return torch.nn.functional.one_hot(token_ids, like.shape[-1]).to(like.dtype)


RULES: dict[Verification, type[Rule]] = {Verification.GUMBEL: GumbelRule, Verification.REJECTION: RejectionRule}
"""How the target's runner chooses."""
DRAFTING_RULES: dict[Verification, type[Rule]] = {Verification.GUMBEL: GumbelRule, Verification.REJECTION: DraftingRule}
"""How a draft model's runner chooses."""


# --- the paper's rule


def accept(target: Tensor, draft: Tensor, drafted: Tensor, uniforms: Tensor) -> Tensor:
    """Which drafts stand, [...]: each with probability min(1, p / q). Distributions [..., vocab], drafted ids and uniforms (0, 1) [...]."""
    p = target.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    q = draft.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    return uniforms * q < p


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What to draw from in a refused draft's place: max(p - q, 0), not normalised; p where they are equal, as nothing is refused there."""
    rest = (target - draft).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Token ids [...] in proportion to weights [..., vocab], by the noise of int32 keys [2, ...]."""
    token_ids = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device)
    return (weights.double().log() + gumbel(token_ids, keys.unsqueeze(-1))).argmax(-1)
