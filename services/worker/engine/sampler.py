"""From logits to tokens: every row of a mixed batch by its own parameters, and independent of its neighbours.

The logits of a row are processed in this order: repetition penalty (prompt and output), frequency and presence penalty (output),
logit bias, bans, the grammar, temperature; then a token survives top-k, top-p (measured on the softmax of what top-k keeps) and min-p.
The token is the argmax of what is left plus Gumbel noise, which is a function of (seed, choice, position, token id) alone: see noise.
Temperature 0 takes the argmax before the filters. Log-probabilities are those of the raw logits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.kernels import library
from services.worker.engine.kernels import sampling as kernels
from services.worker.engine.noise import gumbel, noise_keys
from services.worker.engine.request import PositionLogprobs, SamplingParams, TokenLogprob

_MIN_TEMPERATURE = 1e-6  # below, fp32 can't tell it from greedy
_NUCLEUS = 256  # top-p looks at so many likeliest tokens first,
_NUCLEUS_GROWTH = 16  # and at so many times as many for the rows where their mass falls short of it
_NOISE_ELEMENTS = 1 << 18  # noise is made for so many logits at a time: the working set stays in the cache
_NOISE_MARGIN = 0.5  # fp32 noise is off by up to .3, where it is lowest


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know of a row: the sequence up to the token that is wanted."""

    sampling: SamplingParams
    choice_index: int
    tokens: Sequence[int]  # prompt and output
    num_prompt_tokens: int
    banned_ids: Iterable[int] = ()
    allowed: bytes | None = None  # a mask as of GrammarState; None allows all

    @property
    def position(self) -> int:
        """Of the wanted token in the output."""
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True)
class Sample:
    """A token, or why there is none."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None
    unsatisfiable: bool = False  # the row's own bans leave nothing


@dataclass(frozen=True)
class Peaks:
    """The greatest of each row's processed logits, fp32 [num_rows], and the first token that has it, if it is finite."""

    logits: Tensor
    token_ids: list[int]


Choose = Callable[[Tensor, Peaks, Sequence[SampleRow]], list[int]]
"""(processed logits [num_rows, vocab], their peaks, rows) -> token ids, which mean nothing where the peak isn't finite."""


def sample(logits: Tensor, rows: Sequence[SampleRow], choose: Choose | None = None) -> list[Sample]:
    """One token per row of `logits` [num_rows, vocab] fp32, which is overwritten. A row without a usable logit yields an error.

    `choose` None: `loudest`.
    """
    if not rows:
        return []
    wanting = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = torch.log_softmax(logits[wanting], dim=-1) if wanting else None
    _process(logits, rows)
    peaks = peaks_of(logits)
    tokens = (choose or loudest)(logits, peaks, rows)
    logprobs: dict[int, PositionLogprobs] = {}
    if raw is not None:
        counts = [rows[index].sampling.logprobs or 0 for index in wanting]
        logprobs = dict(zip(wanting, _describe(raw, [tokens[index] for index in wanting], counts), strict=True))
    return [
        Sample(token, logprobs.get(index)) if peak > float("-inf") and peak < float("inf") else _failed(peak)
        for index, (token, peak) in enumerate(zip(tokens, peaks.logits.tolist(), strict=True))
    ]


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> list[PositionLogprobs]:
    """Log-probabilities of `token_ids` and of `count` alternatives under `logits` [num_rows, vocab]; NaN where the logits are."""
    return _describe(torch.log_softmax(logits, dim=-1), token_ids, [count] * len(token_ids))


# --- processing


def _process(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Penalties, biases, bans and grammars, in place."""
    flat, vocab = logits.view(-1), logits.shape[-1]
    _repel(flat, vocab, rows)
    lowered: list[tuple[int, float]] = []
    biased: list[tuple[int, float]] = []
    banned: list[int] = []
    for base, row in zip(range(0, flat.numel(), vocab), rows, strict=True):
        sampling = row.sampling
        if sampling.frequency_penalty or sampling.presence_penalty:
            counts = Counter(row.tokens[row.num_prompt_tokens :])
            lowered += [(base + t, -sampling.frequency_penalty * n - sampling.presence_penalty) for t, n in counts.items()]
        if sampling.logit_bias:
            biased += [(base + token, bias) for token, bias in sampling.logit_bias.items()]
            banned += [base + token for token, bias in sampling.logit_bias.items() if bias <= -100]
        banned += [base + token for token in row.banned_ids]
    for changes in (lowered, biased):  # no place twice in either
        if changes:
            places, amounts = zip(*changes, strict=True)
            flat[torch.tensor(places, device=flat.device)] += torch.tensor(amounts, dtype=flat.dtype, device=flat.device)
    if banned:
        flat[torch.tensor(banned, device=flat.device)] = float("-inf")
    for index, row in enumerate(rows):
        if row.allowed is not None:
            logits[index].masked_fill_(~_unpacked(row.allowed, vocab).to(flat.device), float("-inf"))


def _unpacked(mask: bytes, vocab: int) -> Tensor:
    """Booleans [vocab]; tokens beyond the mask's end aren't allowed."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def _repel(flat: Tensor, vocab: int, rows: Sequence[SampleRow]) -> None:
    """Repetition penalties. A token that is there twice is written twice, with the same value."""
    repelling = [(index, row) for index, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    if not repelling:
        return
    lengths = torch.tensor([len(row.tokens) for _, row in repelling])
    tokens = torch.tensor([token for _, row in repelling for token in row.tokens])
    places = (tokens + torch.tensor([index * vocab for index, _ in repelling]).repeat_interleave(lengths)).to(flat.device)
    penalties = torch.tensor([row.sampling.repetition_penalty for _, row in repelling], dtype=flat.dtype)
    penalties = penalties.repeat_interleave(lengths).to(flat.device)
    values = flat[places]
    flat[places] = torch.where(values > 0, values / penalties, values * penalties)


# --- choosing


def peaks_of(logits: Tensor) -> Peaks:
    """Of processed logits [num_rows, vocab]. Kernels look over a row while torch would still wake its threads."""
    compiled = _kernels_for(logits)
    if compiled is not None:
        return Peaks(*kernels.peaks(compiled, logits))
    return Peaks(logits.amax(dim=-1), logits.argmax(dim=-1).tolist())


def loudest(logits: Tensor, peaks: Peaks, rows: Sequence[SampleRow]) -> list[int]:
    """The Gumbel rule: see Choose. On a CPU with kernels they choose, the same token."""
    tokens = list(peaks.token_ids)
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if not random:
        return tokens
    some = logits if len(random) == len(rows) else logits[random]
    compiled = _kernels_for(logits)
    by = _by_torch if compiled is None else partial(_by_kernels, compiled)
    for index, token in zip(random, by(some, peaks.logits[random], [rows[index] for index in random]), strict=True):
        tokens[index] = token
    return tokens


def _kernels_for(logits: Tensor) -> library.Library | None:
    return library.find() if logits.device.type == "cpu" else None


def _by_kernels(compiled: library.Library, logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    params = [replace(row.sampling, temperature=max(row.sampling.temperature, _MIN_TEMPERATURE)) for row in rows]
    return kernels.choose(compiled, logits, peaks.tolist(), params, [_noise_keys_of(row) for row in rows])


def _by_torch(logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    tokens = [0] * len(rows)
    params = [row.sampling for row in rows]
    scores = _scores(logits, peaks, params)
    keys = noise_key_columns(rows, logits.device)
    filtered = [i for i, p in enumerate(params) if _is_filtered(p, scores.shape[-1])]
    plain = sorted(set(range(len(params))) - set(filtered))
    for start in range(0, len(plain), step := max(1, _NOISE_ELEMENTS // scores.shape[-1])):
        piece = plain[start : start + step]
        chosen = _loudest(scores[piece], _contenders(scores[piece], keys[:, piece]), keys[:, piece])
        for i, token in zip(piece, chosen, strict=True):
            tokens[i] = token
    if filtered:
        survivors = scores[filtered] >= _thresholds(scores[filtered], [params[i] for i in filtered])
        for i, token in zip(filtered, _loudest(scores[filtered], survivors, keys[:, filtered]), strict=True):
            tokens[i] = token
    return tokens


def distribution(logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[num_rows, vocab] fp32: what `loudest` draws from, for processed logits at temperatures above 0."""
    params = [row.sampling for row in rows]
    scores = _scores(logits, peaks, params)
    filtered = [i for i, p in enumerate(params) if _is_filtered(p, scores.shape[-1])]
    if filtered:
        cut = scores[filtered] < _thresholds(scores[filtered], [params[i] for i in filtered])
        scores[filtered] = scores[filtered].masked_fill(cut, float("-inf"))
    return torch.softmax(scores, dim=-1)


def noise_key_columns(rows: Sequence[SampleRow], device: torch.device, *streams: int) -> Tensor:
    """The rows' noise keys, int32 [2, num_rows]."""
    keys = [_noise_keys_of(row, *streams) for row in rows]
    return torch.tensor(keys, dtype=torch.int32, device=device).view(-1, 2).t()


def _noise_keys_of(row: SampleRow, *streams: int) -> tuple[int, int]:
    return noise_keys(row.sampling.seed or 0, row.choice_index, row.position, *streams)


def _scores(logits: Tensor, peaks: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, with the peak at 0: so no temperature can overflow it."""
    temperatures = _column([max(p.temperature, _MIN_TEMPERATURE) for p in params], logits)
    return (logits - peaks.unsqueeze(1)).div_(temperatures)


def _is_filtered(params: SamplingParams, vocab: int) -> bool:
    return bool(_top_k(params, vocab)) or params.top_p < 1 or params.min_p > 0


def _contenders(scores: Tensor, keys: Tensor) -> Tensor:
    """Mask of the few tokens that may win over the whole vocabulary, by noise in fp32, which is off by less than the margin."""
    token_ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    noisy = gumbel(token_ids, keys.unsqueeze(-1), torch.float32).add_(scores)
    return noisy >= noisy.amax(dim=-1, keepdim=True) - _NOISE_MARGIN


def _loudest(scores: Tensor, mask: Tensor, keys: Tensor) -> list[int]:
    """Per row the token of the mask with the greatest score plus noise, the first of equals; noise is made for the mask alone."""
    rows, tokens = mask.nonzero(as_tuple=True)
    noisy = torch.full_like(scores, float("-inf"))
    noisy[rows, tokens] = (gumbel(tokens.int(), keys[:, rows]) + scores[rows, tokens]).float()
    return noisy.argmax(dim=-1).tolist()


def _thresholds(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Lowest score [num_rows, 1] that survives each row's top-k, top-p and min-p. Equal scores survive together, so order plays no part."""
    vocab = scores.shape[-1]
    thresholds = _column([p.min_p for p in params], scores).log_()  # the peak is 0
    thresholds = thresholds.clamp_(min=torch.finfo(scores.dtype).min)
    ranked = [i for i, p in enumerate(params) if _top_k(p, vocab) or p.top_p < 1]
    width = min(max([_NUCLEUS, *(_top_k(params[i], vocab) for i in ranked)]), vocab)
    while ranked:
        cuts, complete = _rank(scores[ranked], [params[i] for i in ranked], width)
        thresholds[ranked] = torch.where(complete, torch.maximum(thresholds[ranked], cuts), thresholds[ranked])
        ranked = [i for i, is_complete in zip(ranked, complete.squeeze(1).tolist(), strict=True) if not is_complete]
        width = min(_NUCLEUS_GROWTH * width, vocab)
    return thresholds


def _rank(scores: Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor]:
    """The cuts [num_rows, 1] by top-k and top-p among the `width` best of each row, and whether those reached as far as top-p does."""
    vocab = scores.shape[-1]
    best = scores.topk(width, dim=-1).values
    counts = _column([_top_k(p, vocab) or vocab for p in params], scores)
    limits = _column([p.top_p if p.top_p < 1 else float("inf") for p in params], scores)
    kept = best.masked_fill(torch.arange(width, device=scores.device) >= counts, float("-inf"))
    # log_softmax reduces each row on its own, whatever the batch, and fp64 hides what exp's last bit owes to an element's place.
    # The greatest score is 0, so its log-probability is minus the logarithm of the mass.
    mass = torch.where(counts < vocab, torch.log_softmax(kept, -1)[:, :1], torch.log_softmax(scores, -1).amax(-1, keepdim=True))
    reached = (kept + mass).double().exp_().cumsum(dim=-1)
    surviving = 1 + (reached[:, :-1] < limits).sum(dim=-1, keepdim=True)
    cuts = best.gather(1, torch.minimum(surviving, counts.long()).sub_(1).clamp_(max=width - 1))
    # At full width all is complete, though rounding (or NaN) may keep the mass below the limit.
    return cuts, (reached[:, -1:] >= limits) | (counts <= width) | torch.isinf(limits)


def _top_k(params: SamplingParams, vocab: int) -> int:
    """0 if off or without effect."""
    return params.top_k if 0 < params.top_k < vocab else 0


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


# --- describing


def _describe(logprobs: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[PositionLogprobs]:
    """`logprobs` is [num_rows, vocab]; counts[i] alternatives are wanted of row i."""
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = (part.tolist() for part in logprobs.topk(min(max(counts), logprobs.shape[-1]), dim=-1))
    return [
        PositionLogprobs(TokenLogprob(token, value), tuple(map(TokenLogprob, ids[row][:count], values[row][:count])))
        for row, (token, value, count) in enumerate(zip(token_ids, chosen, counts, strict=True))
    ]


def _failed(peak: float) -> Sample:
    if peak == float("-inf"):
        return Sample(-1, error="every token is banned: relax logit_bias, min_tokens, stop_token_ids or the grammar", unsatisfiable=True)
    return Sample(-1, error=f"the model's logits are {peak}")
