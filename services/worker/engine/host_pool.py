"""What the device's pool evicts and host memory still holds: which slot has which key, and the copies that the coming step owes.

Slot numbers only: it moves no bytes. The slots are a second BlockPool. A slot that one of those copies reads or writes is referenced
until the step is over, so that nothing takes it away; all others are free or cached. Everybody waits for a step's copies, so they are
bounded.
"""

from collections.abc import Iterable, Sequence

from services.worker.engine.batch import Copy
from services.worker.engine.block_pool import BlockPool


class HostPool:
    """Slots 0 .. num_slots - 1; with none of them it keeps and finds nothing. Keys are the device pool's own."""

    def __init__(self, num_slots: int, max_copies: int) -> None:
        """`max_copies` of one step, out and in alike."""
        self.copies_out: list[Copy] = []
        self.copies_in: list[Copy] = []
        self._slots = BlockPool(num_slots)
        self._max_copies = max_copies

    @property
    def num_slots(self) -> int:
        return self._slots.num_blocks

    @property
    def num_held(self) -> int:
        """Slots that hold a block, or will once the coming step has copied it."""
        return self._slots.num_used + self._slots.num_cached

    def keep(self, block: int, key: bytes) -> None:
        """The device gives `block` away, which is full and found by `key`.

        Where the step can't copy another, the first of its blocks is lost: tails are evicted first, and worthless without their head.
        """
        if slots := self._slots.lookup([key]):
            self._slots.touch(slots)
            self._slots.free(slots)  # as recently used as the block was
            return
        is_full = len(self.copies_out) >= self._max_copies or not self._slots.num_available
        if is_full and not self._drop_first_copy():
            return
        (slot,) = self._slots.allocate(1)
        self._slots.register(slot, key)
        self.copies_out.append(Copy(block, slot))

    def _drop_first_copy(self) -> bool:
        """Loses a block that the step was to copy out. False where all of them are on their way back already."""
        first = next((copy for copy in self.copies_out if self._slots.ref_count(copy.slot) == 1), None)
        if first is None:
            return False
        self.copies_out.remove(first)
        self._slots.forget([first.slot])
        self._slots.free([first.slot])
        return True

    def count(self, keys: Iterable[bytes]) -> int:
        """Length of the longest known prefix of `keys`."""
        return len(self._slots.lookup(keys))

    def take(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of the longest known prefix of `keys` that the step may still copy. They stay what they are until then: `copy_in` them."""
        slots = self._slots.lookup(keys)
        self._slots.touch(slots)
        room = self._max_copies - len(self.copies_in)
        self._slots.free(slots[room:])  # as recently used as the others: the next steps want them
        return slots[:room]

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
        assert all(len(copies) <= self._max_copies for copies in (self.copies_out, self.copies_in)), "more copies than a step may make"
        assert all(len(set(targets)) == len(targets) for targets in written), f"a slot or block is written twice: {written}"
