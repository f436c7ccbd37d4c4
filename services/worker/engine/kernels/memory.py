"""Memory that the kernels stream: on large pages where the system gives them, as each small one costs a walk through the page tables."""

import contextlib
import mmap

import torch
from torch import Tensor

ALIGNMENT = 64  # a cache line
_CHUNK = 32 << 20


def large_pages(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zeros. OSError: there is no such memory."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Copies of tensors one after another, so that small ones share large pages. Lives as long as any of them."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def place(self, values: Tensor) -> Tensor:
        """A copy of `values`, uint8 of one dimension. OSError: there is no memory."""
        size = len(values) + -len(values) % ALIGNMENT
        if size > len(self._rest):
            self._rest = large_pages(max(size, _CHUNK))
        copy, self._rest = self._rest[: len(values)], self._rest[size:]
        return copy.copy_(values)
