"""Rotary position embedding: frequencies as each scaling kind defines them, and a table of cosines and sines that grows on demand."""

import math

import torch
from torch import Tensor

from services.worker.engine.config import ModelConfig, RopeConfig

_PAGE = 1024  # positions computed at a time, always in this shape: an entry's bits don't depend on when it was made


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """(frequencies [head_dim / 2] in radians per position, factor on cosine and sine)."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors), 1.0
    assert rope.kind == "none", rope.kind
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Stretch long waves, keep short ones, blend between."""
    wavelengths = 2 * math.pi / plain
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    stretched = plain / rope.factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * stretched + blend * plain
    scaled = torch.where(wavelengths > shortest_stretched, stretched, plain)
    return torch.where((wavelengths >= longest_kept) & (wavelengths <= shortest_stretched), blended, scaled)


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a linear ramp between dimensions that turn often (kept) and seldom (stretched)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)
    factor = rope.attention_factor
    return frequencies, (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0) if factor is None else factor


class Rotary:
    """Turns pairs (i, i + head_dim / 2) of each head by the position's angles."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.frequencies, self.factor = inverse_frequencies(config.rope, config.head_dim)
        self.dtype, self.device = dtype, device
        self.table = torch.empty(0, 2, config.head_dim, dtype=dtype, device=device)  # cosine; sine, its first half negative

    def at(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """(cosine, sine) [num_tokens, 1, head_dim] of positions, all < num_positions."""
        self.reach(num_positions)
        turns = self.table.index_select(0, positions)
        return turns[:, :1], turns[:, 1:]

    def reach(self, num_positions: int) -> None:
        """Grow the table to at least so many positions."""
        while len(self.table) < num_positions:
            self.table = torch.cat([self.table, self._page(len(self.table))])

    def _page(self, start: int) -> Tensor:
        angles = torch.arange(start, start + _PAGE).float()[:, None] * self.frequencies
        cosine, sine = angles.cos() * self.factor, angles.sin() * self.factor
        page = torch.stack([torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)], 1)
        return page.to(self.dtype).to(self.device)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim]."""
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine
