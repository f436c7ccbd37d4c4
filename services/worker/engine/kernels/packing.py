"""Matrices as the kernels read them: panels of 32 outputs, groups of 32 inputs; see matmul.h for the bytes of a group."""

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.quantization import GROUP, Quantized, pad

PANEL = 32


def pack(weight: Tensor | Quantized, width: int | None = None) -> Tensor:
    """uint8, one dimension. `weight` is [num_outputs, num_inputs] in fp32 or bf16, or Quantized; outputs are filled up to whole panels.

    `width` inputs, a head's or all, are filled up to whole groups; a Quantized has its own.
    """
    if isinstance(weight, Quantized):
        return _pack_integers(weight)
    grouped = _panels(pad(weight, width or weight.shape[1]))  # [panels, 32 outputs, groups, 32 inputs]
    if weight.dtype == torch.float32:
        return grouped.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten()
    assert weight.dtype == torch.bfloat16, weight.dtype
    return grouped.reshape(*grouped.shape[:-1], -1, 2).permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten()


def _pack_integers(weight: Quantized) -> Tensor:
    values = _panels(weight.values)
    parts = [_lanes(weight.scales)]
    if weight.offsets is None:
        fours = values.reshape(*values.shape[:-1], 8, 4)
    else:
        low, high = values.reshape(*values.shape[:-1], 2, 4, 4).unbind(3)
        fours = low | high << 4
        parts.append(_lanes(weight.offsets))
    packed = fours.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten(2)  # [panels, groups, bytes]
    return torch.cat([packed, *parts], -1).flatten()


def _lanes(per_group: Tensor) -> Tensor:
    """fp16 [num_outputs, groups] -> bytes [panels, groups, 64]."""
    return _fill(per_group).reshape(-1, PANEL, per_group.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _panels(rows: Tensor) -> Tensor:
    """[num_outputs, padded inputs] -> [panels, 32, groups, 32]."""
    return _fill(rows).reshape(-1, PANEL, rows.shape[1] // GROUP, GROUP)


def _fill(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL))


def interleave(num_outputs: int) -> Tensor:
    """The order of [gate; up] rows, each padded to whole groups, in panels of 16 gates and their 16 ups."""
    halves = torch.arange(2 * num_outputs).view(2, -1, PANEL // 2)
    return halves.transpose(0, 1).flatten()
