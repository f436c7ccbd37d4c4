"""The device memory of keys and values for torch: one tensor of pages, a page being one block of all layers.

The 8-bit formats have one fp16 scale per slot and head beside it. Knows nothing of who owns a block. Slots that were never written hold
zeros; readers mask them all the same.
"""

import math

import torch
from torch import Tensor

from services.worker.engine.config import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}
UNIT = 16  # slots that are read as one row, at least
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_LEAST_SCALE = 6.2e-5  # about fp16's smallest normal number
_LEAST_FP8 = 2.0**-6  # what is smaller becomes 0: E4M3 without its subnormals, which cost the kernels too much to read


class KVCache:
    """`pages` is [num_blocks, num_layers, 2 (k, v), num_kv_heads, block_size, head_dim], `scales` the same without head_dim, or None.

    Blocks are `rows_per_block` rows of head_dim apart; `unit` slots side by side can be read as one row, see `read`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv_format: str,
        device: torch.device | str,
        memory: Tensor | None = None,
    ) -> None:
        """`memory` is somebody's, uint8 [num_blocks, a multiple of `stride_bytes`, at least a page's bytes]; None: its own.

        The 8-bit formats can't live there.
        """
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        row_bytes = config.head_dim * DTYPES[kv_format].itemsize
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_format = kv_format
        self.rows_per_block = math.prod(shape[1:-1])
        if memory is None:
            self._all = torch.zeros(math.prod(shape), dtype=DTYPES[kv_format], device=device)
        else:
            assert kv_format not in _LARGEST, kv_format
            assert len(memory) == num_blocks, (memory.shape, num_blocks)
            assert memory.shape[1] >= page_bytes(config, block_size, kv_format), memory.shape
            assert memory.shape[1] % stride_bytes(config, kv_format) == 0, (memory.shape, stride_bytes(config, kv_format))
            self.rows_per_block = memory.shape[1] // row_bytes
            self._all = memory.view(DTYPES[kv_format]).flatten()
        self.unit = math.gcd(block_size, self.rows_per_block)
        inner = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
        self.pages = self._all.as_strided(shape, [self.rows_per_block * config.head_dim, *inner])
        self.scales = torch.zeros(shape[:-1], dtype=torch.float16, device=device) if kv_format in _LARGEST else None

    @property
    def tensors(self) -> list[Tensor]:
        """All that blocks consist of; the first dimension of each is the block."""
        return [self.pages] if self.scales is None else [self.pages, self.scales]

    def write(self, layer: int, rows: Tensor, values: Tensor) -> None:
        """Stores values [n, head_dim] at `rows` [n]: numbers of slots of a head, counted from the first of `layer`.

        A slot that is number r in layer 0 is number r here too, so that numbers made once serve every layer.
        """
        if self.scales is None:
            self._rows(layer, self.pages.shape[-1]).index_copy_(0, rows, values.to(self.pages.dtype))
            return
        codes, scales = encode(values.float(), self.kv_format)
        self._rows(layer, self.pages.shape[-1]).index_copy_(0, rows, codes)
        self._scale_rows(layer, 1).index_copy_(0, rows, scales)

    def read(self, layer: int, rows: Tensor, unit: int) -> Tensor:
        """fp32 [n * unit, head_dim]: the slots of `rows` [n], each of which names `unit` slots; `unit` divides the cache's."""
        head_dim = self.pages.shape[-1]
        values = self._rows(layer, unit * head_dim).index_select(0, rows).view(-1, head_dim)
        if self.scales is None:
            return values.float()
        scales = self._scale_rows(layer, unit).index_select(0, rows).view(-1, 1)
        return (values if self.kv_format == "int8" else values.view(torch.float8_e4m3fn)).float() * scales.float()

    def _rows(self, layer: int, width: int) -> Tensor:
        """Rows of `width` elements from the first of `layer` on."""
        per_layer = self.pages[0, 0].numel() // width
        return self._all.view(-1, width)[layer * per_layer :]

    def _scale_rows(self, layer: int, width: int) -> Tensor:
        assert self.scales is not None
        per_layer = self.scales[0, 0].numel() // width
        return self.scales.view(-1, width)[layer * per_layer :]


def encode(values: Tensor, kv_format: str) -> tuple[Tensor, Tensor]:
    """fp32 [n, head_dim] as int8 or FP8 E4M3 codes [n, head_dim] and fp16 scales [n, 1]."""
    scales = (values.abs().amax(-1, keepdim=True) / _LARGEST[kv_format]).clamp(min=_LEAST_SCALE).half()
    steps = values / scales.float()
    if kv_format == "int8":
        return steps.round().clamp(-127, 127).to(torch.int8), scales
    codes = steps.clamp(-_LARGEST["fp8"], _LARGEST["fp8"]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).masked_fill(codes.float().abs() < _LEAST_FP8, 0), scales


def page_bytes(config: ModelConfig, block_size: int, kv_format: str) -> int:
    """Bytes of one block over all layers."""
    scales = 2 * config.num_layers * config.num_kv_heads * 2 if kv_format in _LARGEST else 0
    return (config.kv_bytes_per_token(DTYPES[kv_format].itemsize) + scales) * block_size


def stride_bytes(config: ModelConfig, kv_format: str) -> int:
    """What the distance of two blocks must be a multiple of: UNIT slots of a head."""
    return UNIT * config.head_dim * DTYPES[kv_format].itemsize
