"""What the device's pool evicts and host memory still holds: which slot has which key, and the copies that the coming step owes.

Slot numbers only: it moves no bytes. The slots are a second BlockPool. A slot that one of those copies reads or writes is referenced
until the step is over, so that nothing takes it away; all others are free or cached.
"""

from collections.abc import Iterable, Sequence

from services.worker.engine.batch import Copy
from services.worker.engine.block_pool import BlockPool


class HostPool:
    """Slots 0 .. num_slots - 1; with none of them it keeps and finds nothing. Keys are the device pool's own."""

    def __init__(self, num_slots: int) -> None:
        self.copies_out: list[Copy] = []
        self.copies_in: list[Copy] = []
        self._slots = BlockPool(num_slots)

    @property
    def num_slots(self) -> int:
        return self._slots.num_blocks

    @property
    def num_held(self) -> int:
        """Slots that hold a block, or will once the coming step has copied it."""
        return self._slots.num_used + self._slots.num_cached

    def keep(self, block: int, key: bytes) -> None:
        """The device gives `block` away, which is full and found by `key`. Lost if every slot is part of a copy already."""
        if slots := self._slots.lookup([key]):
            self._slots.touch(slots)
            self._slots.free(slots)  # as recently used as the block was
            return
        if not self._slots.num_available:
            return
        (slot,) = self._slots.allocate(1)
        self._slots.register(slot, key)
        self.copies_out.append(Copy(block, slot))

    def take(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of the longest known prefix of `keys`, which stay what they are until the step is over. `copy_in` them."""
        slots = self._slots.lookup(keys)
        self._slots.touch(slots)
        return slots

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """The coming step shall copy each of the taken slots into a block of its own."""
        self.copies_in += [Copy(block, slot) for block, slot in zip(blocks, slots, strict=True)]

    def settle(self) -> None:
        """The step is over, and with it its copies."""
        # A pool evicts the last of what is freed together first. Blocks come here tail before head, and go back head before tail.
        self._slots.free([copy.slot for copy in reversed(self.copies_out)])
        self._slots.free([copy.slot for copy in self.copies_in])
        self.copies_out, self.copies_in = [], []

    def forget(self, keys: Iterable[bytes]) -> None:
        """No key of these finds a slot any more: their content is suspect."""
        for key in keys:
            slots = self._slots.lookup([key])
            self._slots.touch(slots)
            self._slots.forget(slots)
            self._slots.free(slots)

    def check_integrity(self) -> None:
        """Asserts that every slot is in one place and that no copy but the coming step's references one."""
        self._slots.check_integrity([[copy.slot] for copy in [*self.copies_out, *self.copies_in]])
        written = [copy.slot for copy in self.copies_out], [copy.block for copy in self.copies_in]
        assert all(len(set(targets)) == len(targets) for targets in written), f"a slot or block is written twice: {written}"
