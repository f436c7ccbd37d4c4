"""The sampler in C++ for rows on the CPU: the token that the Gumbel noise of noise.py chooses. See sampler.cpp."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.engine.kernels.library import Library, Peak, SampledRow, check
from services.worker.engine.request import SamplingParams

_UINT32 = 0xFFFFFFFF


def peaks(compiled: Library, logits: Tensor) -> tuple[Tensor, list[int]]:
    """The greatest logit [num_rows] of each row and its token, as sampler.Peaks has them; `logits` [num_rows, vocab] are fp32.

    OSError: there is no memory or thread.
    """
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    num_rows, vocab = logits.shape
    found = (Peak * num_rows)()
    check(compiled.functions.forebay_peaks(logits.data_ptr(), found, num_rows, vocab, torch.get_num_threads()), f"{num_rows} peaks")
    return torch.tensor([peak.logit for peak in found]), [peak.token for peak in found]


def choose(
    compiled: Library, logits: Tensor, peaks: Sequence[float], params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> list[int]:
    """Token ids of rows at temperatures above 0; `logits` [num_rows, vocab] fp32 are processed, `keys` from noise_keys.

    0 where the peak isn't finite. OSError: there is no memory or thread.
    """
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    num_rows, vocab = logits.shape
    start, stride = logits.data_ptr(), 4 * vocab
    rows = (SampledRow * num_rows)()
    for index, (peak, p, (first, second)) in enumerate(zip(peaks, params, keys, strict=True)):
        top_k = p.top_k if 0 < p.top_k < vocab else 0
        rows[index] = SampledRow(start + index * stride, peak, p.temperature, p.top_p, p.min_p, top_k, first & _UINT32, second & _UINT32)
    check(compiled.functions.forebay_sample(rows, num_rows, vocab, torch.get_num_threads()), f"sampling {num_rows} rows")
    return [row.token for row in rows]
