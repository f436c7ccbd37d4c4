"""Host memory for pages of a cache, and the way there and back. Knows no key and no owner.

On a GPU's host the memory is pinned. Beside a CPU's cache it is the same RAM, and merely stands for a slower tier.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.batch import Copy


class HostCache:
    """`num_slots` pages beside the blocks of a cache, which are the first dimension of each of its `tensors`."""

    def __init__(self, tensors: Sequence[Tensor], num_slots: int) -> None:
        self._device = tensors[0].device
        # As bytes: no format is read or rounded.
        self._pages = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors]  # [num_blocks, bytes]
        pinned = self._device.type == "cuda" and num_slots > 0
        self._slots = [torch.empty(num_slots, pages.shape[1], dtype=torch.uint8, pin_memory=pinned) for pages in self._pages]

    def copy(self, copies_out: Sequence[Copy], copies_in: Sequence[Copy]) -> None:
        """Blocks to slots, then slots to blocks; done when it returns."""
        for pages, slots in zip(self._pages, self._slots, strict=True):
            for block, slot in copies_out:
                _copy(slots[slot], pages[block])
            for block, slot in copies_in:
                _copy(pages[block], slots[slot])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.device == source.device:
        # torch would wake its threads for each page, and wait for them: on busy cores that takes longer than any copy.
        np.copyto(target.numpy(), source.numpy())
        return
    target.copy_(source, non_blocking=True)
