"""Weights in 8 or 4 bits: groups of 32 inputs of an output share a scale and, in 4 bits, an offset. weight = scale * value + offset.

Activations meet such weights as signed bytes with a scale per group, so a product is
one of integers; `round_groups` is that rounding for whoever computes in floats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
LEVELS = ("fp32", "bf16", "int8", "int4")
_LARGEST = {"int8": 127, "int4": 15}


@dataclass(frozen=True)
class Quantized:
    """A matrix [num_outputs, num_inputs]. `width` inputs, a head's or all, are filled up with zeros to whole groups."""

    width: int
    values: Tensor  # int8 [num_outputs, padded inputs]: -127 .. 127, or 0 .. 15 where there are offsets
    scales: Tensor  # fp16 [num_outputs, groups]
    offsets: Tensor | None = None  # fp16 [num_outputs, groups]; int4 only

    def dequantize(self) -> Tensor:
        """fp32 [num_outputs, num_inputs]."""
        grouped = self.values.view(*self.scales.shape, GROUP).float() * self.scales.float().unsqueeze(-1)
        if self.offsets is not None:
            grouped += self.offsets.float().unsqueeze(-1)
        return unpad(grouped.flatten(1), self.width)

    def rows(self, order: Tensor) -> "Quantized":
        """The outputs in another order, [num_outputs] int64."""
        return Quantized(self.width, self.values[order], self.scales[order], None if self.offsets is None else self.offsets[order])


Weights = Callable[[str], Tensor | Quantized]  # a model's tensors by Hugging Face name; norms and biases are never quantised


def quantize(weight: Tensor, level: str, width: int | None = None) -> Quantized:
    """`weight` [num_outputs, num_inputs] to the nearest of int8 (symmetric) or int4 (from each group's least to its greatest)."""
    width = width or weight.shape[1]
    grouped = pad(weight.float(), width).view(len(weight), -1, GROUP)
    if level == "int8":
        scales = (grouped.abs().amax(-1) / _LARGEST[level]).half()
        values = _nearest(grouped, scales, torch.zeros_like(scales)).clamp_(-127, 127)
        return Quantized(width, values.to(torch.int8).flatten(1), scales)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales, offsets = ((high - low) / _LARGEST[level]).half(), low.half()
    values = _nearest(grouped, scales, offsets).clamp_(0, 15)
    return Quantized(width, values.to(torch.int8).flatten(1), scales, offsets)


def _nearest(grouped: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    steps = scales.float().unsqueeze(-1)
    return ((grouped - offsets.float().unsqueeze(-1)) / torch.where(steps == 0, torch.inf, steps)).round_()


def tensor(weight: Tensor | Quantized) -> Tensor:
    """What is never quantised, norms and biases."""
    assert isinstance(weight, Tensor)
    return weight


def stack(parts: Sequence[Tensor | Quantized]) -> Tensor | Quantized:
    """Matrices of the same inputs as one, outputs one after another. Parts in 8 and in 4 bits become one in 8."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        assert len(tensors) == len(parts), "floats and integers in one matrix"
        return torch.cat(tensors)
    whole = [part for part in parts if isinstance(part, Quantized)]
    if len({part.offsets is None for part in whole}) > 1:
        whole = [part if part.offsets is None else quantize(part.dequantize(), "int8", part.width) for part in whole]
    offsets = [part.offsets for part in whole if part.offsets is not None]
    return Quantized(
        whole[0].width,
        torch.cat([part.values for part in whole]),
        torch.cat([part.scales for part in whole]),
        torch.cat(offsets) if offsets else None,
    )


def round_groups(x: Tensor, width: int | None = None) -> Tensor:
    """x [num_rows, num_inputs] as its groups are after a round trip through signed bytes; same shape and dtype."""
    width = width or x.shape[-1]
    grouped = pad(x.float(), width).view(*x.shape[:-1], -1, GROUP)
    top = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, 127 / top, 0.0)
    rounded = (grouped * inverse).round_().mul_(top / 127)
    return unpad(rounded.flatten(-2), width).to(x.dtype)


def pad(x: Tensor, width: int) -> Tensor:
    """[.., n * width] -> [.., n * (width rounded up to whole groups)], zeros between."""
    missing = -width % GROUP
    return F.pad(x.reshape(*x.shape[:-1], -1, width), (0, missing)).flatten(-2) if missing else x


def unpad(x: Tensor, width: int) -> Tensor:
    """What `pad` came from."""
    return x.reshape(*x.shape[:-1], -1, width + -width % GROUP)[..., :width].flatten(-2) if width % GROUP else x
