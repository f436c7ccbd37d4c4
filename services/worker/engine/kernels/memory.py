"""Memory that the kernels stream: on large pages where the system gives them, as each small one costs a walk through the page tables."""

import contextlib
import mmap

import torch
from torch import Tensor

ALIGNMENT = 64  # a cache line
_NORESERVE = 0x4000  # Linux's: pages that are never touched count as nobody's


def large_pages(num_bytes: int, flags: int = 0) -> Tensor:
    """uint8 [num_bytes], zeros. OSError: there is no such memory."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Flat:
    """Copies of tensors one after another in one piece of memory, which can be copied as a whole. Lives as long as any of them."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` bounds what is placed; what isn't used of it costs nothing."""
        self._memory = large_pages(most_bytes, _NORESERVE)
        self.num_bytes = 0

    @property
    def bytes(self) -> Tensor:
        """uint8 [num_bytes]: all that was placed."""
        return self._memory[: self.num_bytes]

    def place(self, values: Tensor) -> Tensor:
        """A copy of `values`, uint8 of one dimension. OSError: there is no memory."""
        start = self.num_bytes
        self.num_bytes += len(values) + -len(values) % ALIGNMENT
        assert self.num_bytes <= len(self._memory), (self.num_bytes, len(self._memory))
        return self._memory[start : start + len(values)].copy_(values)
