"""The cache of the native decoder: pages of bytes in the order that its attention reads, see cache.h. Knows nothing of who owns a block."""

import torch

from services.worker.engine.config import ModelConfig
from services.worker.engine.kernels import library
from services.worker.engine.kernels.memory import ALIGNMENT, large_pages

LANES = 16
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "fp8": 1}


class NativeCache:
    """`pages` is uint8 [num_blocks, bytes of a page]: all layers' tiles, then for the 8-bit formats their fp16 scales."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, kv_format: str, pages: torch.Tensor | None = None) -> None:
        """`pages` are somebody's, [num_blocks, at least a page's bytes]; None: its own."""
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_format = kv_format
        self._page_bytes = page_bytes(config, block_size, kv_format)
        self.pages = large_pages(num_blocks * self._page_bytes).view(num_blocks, -1) if pages is None else pages
        assert self.pages.shape[0] == num_blocks, (self.pages.shape, num_blocks)
        assert self.pages.shape[1] >= self._page_bytes, (self.pages.shape, self._page_bytes)
        assert self.pages.shape[1] % ALIGNMENT == 0, self.pages.shape

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that blocks consist of; the first dimension of each is the block."""
        return [self.pages[:, : self._page_bytes]]

    def wire(self) -> library.Cache:
        """What the kernels are told; `pages` must outlive it."""
        slots, width, layer_bytes = _layer(self.config, self.block_size, self.kv_format)
        page = self.pages.shape[1]
        return library.Cache(
            tiles=self.pages.data_ptr(),
            scales=self.pages.data_ptr() + layer_bytes * self.config.num_layers,
            block_bytes=page,
            layer_bytes=layer_bytes,
            block_scales=page // 2,
            layer_scales=2 * self.config.num_kv_heads * slots,
            block_size=self.block_size,
            slots=slots,
            width=width,
            num_kv_heads=self.config.num_kv_heads,
            format=library.CACHE_FORMATS[self.kv_format],
        )


def page_bytes(config: ModelConfig, block_size: int, kv_format: str) -> int:
    """Bytes of one block over all layers, a multiple of ALIGNMENT so that no vector crosses a cache line."""
    slots, _, layer_bytes = _layer(config, block_size, kv_format)
    scales = 2 * 2 * config.num_kv_heads * slots if ELEMENT_BYTES[kv_format] == 1 else 0
    size = config.num_layers * (layer_bytes + scales)
    return size + -size % ALIGNMENT


def _layer(config: ModelConfig, block_size: int, kv_format: str) -> tuple[int, int, int]:
    """(slots of a tile, dimensions of a tile, bytes of a layer's tiles)."""
    slots, width = (number + -number % LANES for number in (block_size, config.head_dim))
    return slots, width, 2 * config.num_kv_heads * slots * width * ELEMENT_BYTES[kv_format]
