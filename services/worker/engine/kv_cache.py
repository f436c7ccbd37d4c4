"""The device memory of keys and values: one tensor of pages, a page being one block of all layers.

Knows nothing of who owns a block. Slots that were never written hold zeros; readers mask them all the same.
"""

import torch
from torch import Tensor

from services.worker.engine.config import ModelConfig


class KVCache:
    """`pages` is [num_blocks, num_layers, 2 (k, v), num_kv_heads, block_size, head_dim]."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pages = torch.zeros(shape, dtype=dtype, device=device)

    def layer_rows(self, layer: int, unit: int) -> Tensor:
        """Rows of `unit` slots of one head, [rows, unit * head_dim], from the first row of `layer` on.

        A row that is number r in layer 0 is number r here too, so that row numbers made once serve every layer. `unit` divides block_size.
        """
        _, _, _, num_kv_heads, block_size, head_dim = self.pages.shape
        return self.pages.view(-1, unit * head_dim)[layer * 2 * num_kv_heads * (block_size // unit) :]
