"""Gumbel noise without a generator: a function of a seed, a choice, a position and a token id, the same on every device."""

import torch
from torch import Tensor

_UINT32 = 0xFFFFFFFF
_UINT64 = 0xFFFFFFFFFFFFFFFF


def gumbel(token_ids: Tensor, keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard Gumbel noise for int32 `token_ids` under int32 `keys` [2, ...] (from `noise_keys`); shapes broadcast.

    32-bit integer arithmetic that wraps (two keyed multiply-xorshift rounds) makes x, and v = ((x mod 2^31) + 1/2) / 2^31 is uniform
    in (0, 1); the noise is -log(-log(1 - v)), between -3.1 and 22.2. So it depends on no batch, device or generator state: integers
    are exact everywhere, and the last bits of a logarithm, which are not, vanish when fp64 noise plus score is rounded to fp32.
    """
    x = (token_ids * -0x61C8864F) ^ keys[0]
    x ^= (x >> 16) & 0xFFFF  # a logical shift: int32 shifts its sign in
    x *= -0x7A143595
    x ^= (x >> 13) & 0x7FFFF
    x ^= keys[1]
    x *= -0x3D4D51CB
    x ^= (x >> 16) & 0xFFFF
    v = (x & 0x7FFFFFFF).to(dtype).add_(0.5).mul_(2.0**-31)
    if dtype == torch.float32:
        v.clamp_(max=1 - 2.0**-24)  # it must not round to 1
    return v.neg_().log1p_().neg_().log_().neg_()


def noise_keys(seed: int, choice_index: int, position: int, *streams: int) -> tuple[int, int]:
    """The two 32-bit keys (as signed ints) of one sampled token's noise: chained rounds of splitmix64. `streams` make further noise."""
    key = 0
    for word in (seed, choice_index, position, *streams):
        key = _splitmix64(key ^ (word & _UINT64))
    return _signed(key & _UINT32), _signed(key >> 32)


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
