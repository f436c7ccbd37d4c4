"""GGUF's blocks as groups of 32: the same values as gguf's own arithmetic makes of them."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from services.worker.engine.gguf_blocks import from_gguf
from tests.tiny_models import GGUF_TYPES

EXACT = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]


def random_bytes(kind: Kind, num_rows: int, num_inputs: int, largest: float) -> np.ndarray:
    """[num_rows, bytes of a row] of any bits, but scales and offsets up to `largest`: fp16 numbers at the front of a block."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    blocks = rng.integers(0, 256, (num_rows, num_inputs // size, num_bytes), np.uint8)
    for place in (0, 2) if kind in (Kind.Q4_1, Kind.Q4_K) else (0,):
        scales = rng.uniform(-largest, largest, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("largest", [8000.0, 1.0, 1e-6])
def test_values_are_exactly_the_files(kind: Kind, largest: float) -> None:
    raw = random_bytes(kind, 7, 96, largest)
    quantized = from_gguf(raw, kind)
    assert quantized is not None
    assert (quantized.width, quantized.values.shape, quantized.scales.shape) == (96, (7, 96), (7, 3))
    assert torch.equal(quantized.dequantize(), torch.from_numpy(dequantize(raw, kind)))
    assert (quantized.offsets is None) == (kind is Kind.Q8_0)


def test_q4_k_is_within_the_rounding_of_fp16() -> None:
    raw = random_bytes(Kind.Q4_K, 5, 512, 0.05)
    quantized = from_gguf(raw, Kind.Q4_K)
    assert quantized is not None
    expected = torch.from_numpy(dequantize(raw, Kind.Q4_K))
    error = (quantized.dequantize() - expected).view(5, 16, 32).abs().amax(-1)
    assert quantized.offsets is not None
    assert (error <= 2**-11 * (15 * quantized.scales.float().abs() + quantized.offsets.float().abs()) + 1e-7).all()
    assert error.max() > 0  # 6-bit factors of an fp16 number don't fit into one


def test_other_types_have_no_such_form() -> None:
    for name in GGUF_TYPES - {"Q4_0", "Q4_1", "Q4_K", "Q8_0"}:
        assert from_gguf(np.zeros((1, 1024), np.uint8), Kind[name]) is None


def test_hostile_scales_are_infinite_or_nan_and_warn_of_nothing() -> None:
    for kind in (*EXACT, Kind.Q4_K):
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.full((1, num_bytes), 0xFF, np.uint8)
        raw[0, 0:4] = np.array([65504, -65504], np.float16).view(np.uint8)
        assert from_gguf(raw, kind) is not None
        raw[0, 0:2] = np.array([np.nan], np.float16).view(np.uint8)
        quantized = from_gguf(raw, kind)
        assert quantized is not None
        assert quantized.dequantize().shape == (1, size)
        assert quantized.dequantize().isnan().any()
