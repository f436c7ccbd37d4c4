"""GGUF's 4- and 8-bit types as `Quantized`, value by value: nothing is quantised twice. Knows the types' bytes, not the file."""

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from services.worker.engine.quantization import Quantized


def from_gguf(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Quantized | None:
    """`raw` [num_outputs, bytes of a row] as a Quantized of the same values; None where the type has no such form."""
    unpack = {
        GGMLQuantizationType.Q4_0: _q4_0,
        GGMLQuantizationType.Q4_1: _q4_1,
        GGMLQuantizationType.Q4_K: _q4_k,
        GGMLQuantizationType.Q8_0: _q8_0,
    }.get(kind)
    if unpack is None:
        return None
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(len(raw), -1, block_bytes)
    num_inputs = blocks.shape[1] * block_size
    with np.errstate(all="ignore"):  # hostile scales overflow to infinity; that is for the logits' check to say
        values, scales, offsets = unpack(blocks)
        return Quantized(
            num_inputs,
            torch.from_numpy(np.ascontiguousarray(values, np.int8).reshape(len(raw), num_inputs)),
            torch.from_numpy(scales.astype(np.float16).reshape(len(raw), -1)),
            None if offsets is None else torch.from_numpy(offsets.astype(np.float16).reshape(len(raw), -1)),
        )


_Bytes = npt.NDArray[np.uint8]
_Parts = tuple[npt.NDArray[np.integer], npt.NDArray[np.floating], npt.NDArray[np.floating] | None]


def _halves(blocks: _Bytes, place: int) -> npt.NDArray[np.float16]:
    """The fp16 number at a byte of each block, [.., 1]."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)


def _nibbles(packed: _Bytes) -> _Bytes:
    """[.., n] bytes -> [.., 2n]: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q4_0(blocks: _Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[..., 2:]), scales, scales * np.float16(-8)


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    return blocks[..., 2:].view(np.int8), _halves(blocks, 0), None


def _q4_k(blocks: _Bytes) -> _Parts:
    """Eight groups of 32 whose 6-bit scales and offsets share two fp16 factors; what fp16 makes of the products is within 2^-11."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], -1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], -1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return (
        np.stack([pairs & 15, pairs >> 4], -2),
        _halves(blocks, 0).astype(np.float32) * scales,
        -_halves(blocks, 2).astype(np.float32) * offsets,
    )
