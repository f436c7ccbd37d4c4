"""What host memory holds: blocks that the device's pool has evicted, by their keys, and those that preempted sequences come back for.

Slot numbers only: it moves no bytes. The slots are a second BlockPool. A slot that one of the coming step's copies reads or writes is
referenced until the step is over, one that a preempted sequence needs until that has it back; all others are free or cached. Everybody
waits for a step's copies, so those of evicted blocks are bounded. Swapped ones can't wait; there are at most `num_swappable`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.worker.engine.batch import Copy
from services.worker.engine.block_pool import BlockPool
from services.worker.engine.sequence import Swap


@dataclass
class _Promise:
    """A key that preempted sequences come back for."""

    count: int = 0  # of them
    slot: int | None = None  # where it is; None: the device still has it, and a slot is kept free for it


class HostPool:
    """Slots 0 .. num_slots - 1 for evicted blocks, and `num_swappable` more; with none of either it keeps and finds nothing."""

    def __init__(self, num_slots: int, max_copies: int, num_swappable: int = 0) -> None:
        """`max_copies` of one step, out and in alike."""
        self.copies_out: list[Copy] = []
        self.copies_in: list[Copy] = []
        self._slots = BlockPool(num_slots + num_swappable)
        self._max_copies = max_copies
        self._num_swappable = num_swappable
        self._keeps_evicted = num_slots > 0
        self._promises: dict[bytes, _Promise] = {}
        self._owned: set[int] = set()  # slots of one preempted sequence each
        self._num_open = 0  # promises without a slot

    @property
    def num_slots(self) -> int:
        return self._slots.num_blocks

    @property
    def num_held(self) -> int:
        """Slots that hold a block, or will once the coming step has copied it."""
        return self._slots.num_used + self._slots.num_cached

    @property
    def num_swapped(self) -> int:
        """Blocks that preempted sequences come back for."""
        return len(self._owned) + len(self._promises)

    # --- what the device evicts

    def keep(self, block: int, key: bytes) -> None:
        """The device gives `block` away, which is full and found by `key`.

        Where the step can't copy another, the first of its blocks is lost: tails are evicted first, and worthless without their head.
        """
        if slots := self._slots.lookup([key]):
            self._slots.touch(slots)
            self._slots.free(slots)  # as recently used as the block was
            return
        promise = self._promises.get(key)
        if promise is not None and promise.slot is None:
            promise.slot = self._copy_out(block, key)
            self._slots.touch([promise.slot])
            self._num_open -= 1
        elif self._keeps_evicted:
            is_full = len(self.copies_out) >= self._max_copies or self._num_spare == 0
            if not is_full or self._drop_first_copy():
                self._copy_out(block, key)

    @property
    def _num_spare(self) -> int:
        """Slots that can be had without breaking a promise."""
        return self._slots.num_available - self._num_open

    def _copy_out(self, block: int, key: bytes | None) -> int:
        (slot,) = self._slots.allocate(1)
        if key is not None:
            self._slots.register(slot, key)
        self.copies_out.append(Copy(block, slot))
        return slot

    def _drop_first_copy(self) -> bool:
        """Loses a block that the step was to copy out. False where all of them are promised, or on their way back already."""
        first = next((copy for copy in self.copies_out if self._slots.ref_count(copy.slot) == 1), None)
        if first is None:
            return False
        self.copies_out.remove(first)
        self._slots.forget([first.slot])
        self._slots.free([first.slot])
        return True

    # --- what preempted sequences come back for

    def promise(self, keys: Collection[bytes], blocks: Sequence[int]) -> list[int] | None:
        """Sees to it that blocks found by `keys` will be found, and copies private `blocks`: the slots of those.

        None, and nothing promised, where there is no room for all. `break_promise` ends it.
        """
        fresh = [key for key in keys if key not in self._promises]
        found = {key: slot for key in fresh for slot in self._slots.lookup([key])}
        num_missing = len(fresh) - len(found) + len(blocks)
        if self.num_swapped + len(fresh) + len(blocks) > self._num_swappable:
            return None
        if num_missing + self._slots.num_unreferenced(found.values()) > self._num_spare:
            return None
        for key in keys:
            promise = self._promises.setdefault(key, _Promise(slot=found.get(key)))
            promise.count += 1
        self._slots.touch(found.values())
        self._num_open += len(fresh) - len(found)
        slots = [self._copy_out(block, None) for block in blocks]
        self._slots.touch(slots)
        self._owned.update(slots)
        return slots

    def break_promise(self, keys: Iterable[bytes], slots: Collection[int]) -> None:
        """The sequence has its blocks back, or has ended."""
        for key in keys:
            promise = self._promises[key]
            promise.count -= 1
            if promise.count:
                continue
            del self._promises[key]
            if promise.slot is None:
                self._num_open -= 1
            else:
                self._give_up([promise.slot])
        self._owned.difference_update(slots)
        self._give_up(slots)

    def _give_up(self, slots: Collection[int]) -> None:
        """What is found by a key stays as if the device had evicted it, if that is kept."""
        if not self._keeps_evicted:
            self._slots.forget(slots)
        self._slots.free(list(slots))

    # --- what comes back

    def count(self, keys: Iterable[bytes]) -> int:
        """Length of the longest known prefix of `keys`."""
        return len(self._slots.lookup(keys))

    def find(self, key: bytes) -> int | None:
        """The slot that holds it."""
        return next(iter(self._slots.lookup([key])), None)

    def take(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of the longest known prefix of `keys` that the step may still copy. They stay what they are until then: `copy_in` them."""
        slots = self._slots.lookup(keys)
        room = min(len(slots), self.num_copies_left)
        while self._slots.num_unreferenced(slots[:room]) > self._num_spare:  # what is read can't be given away for what is promised
            room -= 1
        self._slots.touch(slots)
        self._slots.free(slots[room:])  # as recently used as the others: the next steps want them
        return slots[:room]

    @property
    def num_copies_left(self) -> int:
        """Blocks that the coming step may still bring back."""
        return self._max_copies - len(self.copies_in)

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """The coming step shall copy each of the taken slots into a block of its own."""
        self.copies_in += [Copy(block, slot) for block, slot in zip(blocks, slots, strict=True)]

    def read(self, slot: int, block: int) -> None:
        """The coming step shall copy a slot that is promised."""
        self._slots.touch([slot])
        self.copy_in([slot], [block])

    def settle(self) -> None:
        """The step is over, and with it its copies."""
        # A pool evicts the last of what is freed together first. Blocks come here tail before head, and go back head before tail.
        self._slots.free([copy.slot for copy in reversed(self.copies_out)])
        self._slots.free([copy.slot for copy in self.copies_in])
        self.copies_out, self.copies_in = [], []

    def forget(self, keys: Iterable[bytes]) -> None:
        """No key of these finds a slot any more: their content is suspect. Whom it was promised to computes it again."""
        for key in keys:
            slots = self._slots.lookup([key])
            self._slots.touch(slots)
            self._slots.forget(slots)
            self._slots.free(slots)

    def check_integrity(self, swaps: Iterable[Swap] = ()) -> None:
        """Asserts that every slot is in one place, that copies and `swaps` alone reference any, and that all that is promised has room."""
        promised = [promise.slot for promise in self._promises.values() if promise.slot is not None]
        tables = [[copy.slot] for copy in [*self.copies_out, *self.copies_in]]
        self._slots.check_integrity([*tables, promised, list(self._owned)])
        wanted = Counter(key for swap in swaps for key in swap.keys.values())
        assert wanted == {key: promise.count for key, promise in self._promises.items()}, "promises to nobody, or none to somebody"
        assert sorted(slot for swap in swaps for slot in swap.slots.values()) == sorted(self._owned), "slots of nobody, or none of somebody"
        written = [copy.slot for copy in self.copies_out], [copy.block for copy in self.copies_in]
        assert len(self.copies_out) <= self._max_copies + self._num_swappable, "more copies out than a step may make"
        assert len(self.copies_in) <= self._max_copies, "more copies in than a step may make"
        assert all(len(set(targets)) == len(targets) for targets in written), f"a slot or block is written twice: {written}"
        assert self._num_open == len(self._promises) - len(promised), "open promises are counted wrongly"
        assert self.num_swapped <= self._num_swappable, "more is promised than may be"
        assert self._num_spare >= 0, "a promise can't be kept"
