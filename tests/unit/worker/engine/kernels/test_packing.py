"""Packed matrices, read back byte by byte as matmul.h describes them."""

from itertools import product

import pytest
import torch
from torch import Tensor

from services.worker.engine.kernels.packing import PANEL, interleave, pack
from services.worker.engine.quantization import GROUP, Quantized, pad, quantize

SHAPES = list(product([1, 31, 32, 70], [(20, None), (64, None), (60, 20), (96, 48)]))  # outputs, (inputs, width of a head)


def groups(packed: Tensor, num_bytes: int, num_outputs: int) -> Tensor:
    """uint8 [panels, groups, bytes]."""
    return packed.view(-(-num_outputs // PANEL), -1, num_bytes)


def unpack(parts: Tensor, num_outputs: int) -> Tensor:
    """[panels, groups, 32 inputs, 32 outputs] -> [num_outputs, padded inputs]; what fills up the last panel is zero."""
    rows = parts.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)
    assert not rows[num_outputs:].any()
    return rows[:num_outputs]


@pytest.mark.parametrize(("num_outputs", "inputs"), SHAPES)
def test_floats(num_outputs: int, inputs: tuple[int, int | None]) -> None:
    num_inputs, width = inputs
    weight = torch.randn(num_outputs, num_inputs)
    expected = pad(weight, width or num_inputs)
    parts = (
        groups(pack(weight, width), GROUP * PANEL * 4, num_outputs).view(torch.float32).view(-1, expected.shape[1] // GROUP, GROUP, PANEL)
    )
    assert torch.equal(unpack(parts, num_outputs), expected)


@pytest.mark.parametrize(("num_outputs", "inputs"), SHAPES)
def test_bf16(num_outputs: int, inputs: tuple[int, int | None]) -> None:
    num_inputs, width = inputs
    weight = torch.randn(num_outputs, num_inputs).bfloat16()
    expected = pad(weight, width or num_inputs)
    pairs = groups(pack(weight, width), GROUP * PANEL * 2, num_outputs).view(torch.bfloat16)
    parts = pairs.view(-1, expected.shape[1] // GROUP, GROUP // 2, PANEL, 2).transpose(3, 4).flatten(2, 3)
    assert torch.equal(unpack(parts, num_outputs), expected)


@pytest.mark.parametrize(("num_outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("level", ["int8", "int4"])
def test_integers(level: str, num_outputs: int, inputs: tuple[int, int | None]) -> None:
    weight = quantize(torch.randn(num_outputs, inputs[0]), level, inputs[1])
    num_groups = weight.scales.shape[1]
    value_bytes = GROUP * PANEL // (1 if level == "int8" else 2)
    scale_bytes = 2 * PANEL * (1 if level == "int8" else 2)
    raw = groups(pack(weight), value_bytes + scale_bytes, num_outputs)
    fours = raw[..., :value_bytes].reshape(-1, num_groups, value_bytes // PANEL // 4, PANEL, 4).transpose(3, 4).flatten(2, 3)
    values = fours.view(torch.int8) if level == "int8" else torch.cat([fours & 15, fours >> 4], 2).to(torch.int8)
    scales = raw[..., value_bytes:].contiguous().view(torch.float16).view(-1, num_groups, scale_bytes // 2 // PANEL, PANEL)
    found = Quantized(weight.width, unpack(values, num_outputs), unpack(scales[:, :, :1], num_outputs))
    assert torch.equal(found.values, weight.values)
    assert torch.equal(found.scales, weight.scales)
    if weight.offsets is not None:
        assert torch.equal(unpack(scales[:, :, 1:], num_outputs), weight.offsets)


def test_gates_and_ups_take_turns_by_sixteen() -> None:
    assert interleave(32).tolist() == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]
