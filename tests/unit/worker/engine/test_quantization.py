"""Groups of 32: how near they are, how they are filled up, how matrices of different bits become one."""

import pytest
import torch
from torch import Tensor

from services.worker.engine.quantization import GROUP, Quantized, pad, quantize, round_groups, stack, tensor, unpad

SHAPES = [(3, 32, None), (5, 100, None), (1, 7, None), (4, 60, 20), (4, 96, 48), (2, 128, 64)]  # outputs, inputs, width


def by_group(weight: Tensor, width: int | None) -> Tensor:
    return pad(weight, width or weight.shape[1]).view(len(weight), -1, GROUP)


@pytest.mark.parametrize(("num_outputs", "num_inputs", "width"), SHAPES)
def test_the_error_is_half_a_step(num_outputs: int, num_inputs: int, width: int | None) -> None:
    weight = torch.randn(num_outputs, num_inputs) * torch.logspace(-3, 2, num_inputs)
    for level in ("int8", "int4"):
        quantized = quantize(weight, level, width)
        assert quantized.dequantize().shape == weight.shape
        grouped, error = by_group(weight, width), by_group(quantized.dequantize() - weight, width).abs().amax(-1)
        # Half a step, and what fp16 makes of step (127 or 15 of them) and offset.
        magnitude = grouped.abs().amax(-1)
        assert (error <= 0.5 * quantized.scales.float() + 2**-10 * magnitude + 1e-6).all()
        assert quantized.values.shape == pad(weight, width or num_inputs).shape
        assert quantized.scales.shape == magnitude.shape


def test_values_stay_in_their_range() -> None:
    weight = torch.randn(8, 320) * 1e-3
    eight, four = quantize(weight, "int8"), quantize(weight, "int4")
    assert (eight.values.min(), eight.values.max()) >= (-127, 127)
    assert eight.offsets is None
    assert four.offsets is not None
    assert (int(four.values.min()), int(four.values.max())) == (0, 15)


@pytest.mark.parametrize("level", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-9])
def test_a_group_of_one_value_keeps_it(value: float, level: str) -> None:
    assert quantize(torch.full((1, 32), value), level).dequantize().sub(value).abs().max() <= 2**-11 * abs(value) + 1e-8


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_what_is_no_number_or_beyond_fp16_is_not_hidden(level: str) -> None:
    for odd in (float("nan"), float("inf"), 1e9):
        weight = torch.ones(2, 64)
        weight[1, 40] = odd
        result = quantize(weight, level).dequantize()
        assert result[0].isfinite().all()
        assert result[1, :32].isfinite().all()
        assert not result[1, 32:].isfinite().all()


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_rounding_twice_changes_nothing(level: str) -> None:
    once = quantize(torch.randn(4, 64), level)
    again = quantize(once.dequantize(), level)
    assert (again.dequantize() - once.dequantize()).abs().max() < 4e-3


def test_heads_are_filled_up_one_by_one() -> None:
    x = torch.arange(1.0, 41).view(1, 40)
    padded = pad(x, 20)
    assert padded.shape == (1, 64)
    assert torch.equal(padded.view(2, 32)[:, :20], x.view(2, 20))
    assert not padded.view(2, 32)[:, 20:].any()
    assert torch.equal(unpad(padded, 20), x)
    assert pad(x, 40).shape == (1, 64)
    assert torch.equal(pad(torch.ones(2, 64), 32), torch.ones(2, 64))


def test_rows_come_in_another_order() -> None:
    for level in ("int8", "int4"):
        weight, order = quantize(torch.randn(4, 40), level), torch.tensor([2, 0, 3, 1])
        assert torch.equal(weight.rows(order).dequantize(), weight.dequantize()[order])


def test_all_of_it_goes_to_a_device() -> None:
    for level, num_parts in (("int8", 2), ("int4", 3)):
        moved = quantize(torch.randn(4, 40), level).to("meta")
        assert [part.device.type for part in (moved.values, moved.scales, moved.offsets) if part is not None] == ["meta"] * num_parts
        assert moved.dequantize().shape == (4, 40)


def test_a_stack_of_one_kind_keeps_every_value() -> None:
    parts = [torch.randn(count, 48) for count in (1, 5, 3)]
    assert torch.equal(tensor(stack(parts)), torch.cat(parts))
    for level in ("int8", "int4"):
        quantized = [quantize(part, level) for part in parts]
        assert torch.equal(as_quantized(stack(quantized)).dequantize(), torch.cat([part.dequantize() for part in quantized]))


def test_a_stack_of_8_and_4_bits_has_8() -> None:
    eight, four = quantize(torch.randn(3, 96), "int8", 48), quantize(torch.randn(2, 96), "int4", 48)
    both = as_quantized(stack([four, eight]))
    assert both.offsets is None
    assert both.width == 48
    result = both.dequantize()
    assert torch.equal(result[2:], eight.dequantize())
    assert (result[:2] - four.dequantize()).abs().max() <= 0.5 * both.scales[:2].float().max() + 2e-3


def as_quantized(weight: Tensor | Quantized) -> Quantized:
    assert isinstance(weight, Quantized)
    return weight


@pytest.mark.parametrize("width", [None, 20])
def test_activations_are_rounded_to_127_steps_of_their_group(width: int | None) -> None:
    x = torch.randn(3, 40)
    x[1] = 0
    rounded = round_groups(x, width)
    steps = by_group(x, width).abs().amax(-1) / 127
    assert (by_group(rounded - x, width).abs().amax(-1) <= 0.501 * steps).all()
    assert torch.equal(rounded[1], x[1])
    assert round_groups(x.bfloat16(), width).dtype == torch.bfloat16
    x[2, 0] = float("nan")
    assert round_groups(x, width)[2, :20].isnan().all()
