"""One pool of pages for all models of a device: who holds how many, and what each keeps for itself. Page numbers only, no clock.

A page is a block of whatever model holds it. Cached pages are nobody's reserve: the pool gives them away by age, whosever they are.
"""

from collections.abc import Callable, Iterable, Sequence

from services.worker.engine.block_pool import BlockPool, OnEvict


class ModelPool:
    """One model's part of an arena. Implements SharedPool."""

    is_shared = True

    def __init__(self, arena: "Arena", model: str, floor: int, ceiling: int) -> None:
        """Made by Arena.open."""
        self.model = model
        self.floor = floor  # pages that no other model can keep it from
        self.num_blocks = ceiling
        self.num_used = 0
        self.num_cached = 0
        self.num_growing = 0  # see claims
        self.num_claimed = 0  # see claims
        self.on_evict: OnEvict | None = None
        self.on_lost: Callable[[], None] | None = None
        self._arena = arena

    @property
    def num_available(self) -> int:
        """What is left for it by the others' floors and its own ceiling."""
        kept = sum(other.num_owed for other in self._others)
        return max(0, min(self._arena.pages.num_available - kept, self.num_blocks - self.num_used))

    @property
    def num_owed(self) -> int:
        """Of its floor, what it doesn't hold now."""
        return max(0, self.floor - self.num_used)

    @property
    def num_withheld(self) -> int:
        """Pages for which another waits, or which others' running sequences may need next; of both, those that no floor holds already."""
        return sum(max(0, other.num_claimed + other.num_growing - other.num_owed) for other in self._others)

    @property
    def num_free(self) -> int:
        """Available pages behind its own cached ones: free, or another's cached."""
        return max(0, self.num_available - self.num_cached)

    @property
    def _others(self) -> list["ModelPool"]:
        return [other for other in self._arena.models.values() if other is not self]

    def ref_count(self, block: int) -> int:
        """Of a page that it holds."""
        return self._arena.pages.ref_count(block)

    def allocate(self, count: int) -> list[int]:
        """`count` private pages; evicts the oldest cached ones, whosever they are."""
        assert count <= self.num_available, f"{self.model} wants {count} blocks, {self.num_available} available"
        blocks = self._arena.allocate(self, count)
        self.num_used += count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """See BlockPool."""
        pages = self._arena.pages
        assert all(self._arena.holder(block) is self for block in blocks), f"{self.model} frees a page that isn't its own"
        pages.free(blocks)
        for block in set(blocks):
            if pages.ref_count(block) == 0:
                self.num_used -= 1
                if pages.is_cached(block):
                    self.num_cached += 1
                else:
                    self._arena.leave(block)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """See BlockPool."""
        blocks = []
        for key in keys:
            if (block := self.find(key)) is None:
                break
            blocks.append(block)
        return blocks

    def find(self, key: bytes) -> int | None:
        """Its own page that answers to the key: another model's is never found, whatever the key."""
        block = self._arena.pages.find(key)
        return block if block is not None and self._arena.holder(block) is self else None

    def finds(self, block: int, key: bytes) -> bool:
        """See BlockPool."""
        return self._arena.pages.finds(block, key)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """See BlockPool."""
        return self._arena.pages.num_unreferenced(blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        """See BlockPool."""
        for block in blocks:
            assert self._arena.holder(block) is self, f"{self.model} touches page {block}, which isn't its own"
            if self._arena.pages.is_cached(block):
                self.num_cached -= 1
                self.num_used += 1
            self._arena.pages.touch([block])

    def register(self, block: int, key: bytes) -> None:
        """See BlockPool."""
        self._arena.pages.register(block, key)

    def forget(self, blocks: Iterable[int]) -> None:
        """See BlockPool."""
        self._arena.pages.forget(blocks)

    def lose(self, block: int, key: bytes, *, to_another: bool) -> None:
        """Its cached page is given away."""
        self.num_cached -= 1
        if self.on_evict is not None:
            self.on_evict(block, key)
        if to_another and self.on_lost is not None:
            self.on_lost()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that its pages are referenced as often as `tables` (all of its sequences') name them, and that it counts them right."""
        counts: dict[int, int] = {}
        for table in tables:
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        held = self._arena.held_by(self)
        referenced = {block: count for block in held if (count := self.ref_count(block))}
        assert counts == referenced, f"{self.model}: ref counts {referenced} but the block tables say {counts}"
        assert (self.num_used, self.num_cached) == (len(referenced), len(held) - len(referenced)), f"{self.model} counts wrongly"


class Arena:
    """All pages of a device, 0 .. num_pages - 1. `on_handover` hears of each page that a model gets, before it does."""

    def __init__(self, num_pages: int, *, keep_cached: bool = True, on_handover: Callable[[int], None] | None = None) -> None:
        self.pages = BlockPool(num_pages, keep_cached=keep_cached, on_evict=self._evicted)
        self.models: dict[str, ModelPool] = {}
        self._holders: list[ModelPool | None] = [None] * num_pages  # of referenced and cached pages
        self._on_handover = on_handover
        self._taker: ModelPool | None = None

    def open(self, model: str, *, floor: int = 0, ceiling: int | None = None) -> ModelPool:
        """A further model's part. ValueError: the floors would come to more than there is, or leave a ceiling out of reach."""
        left = self.pages.num_blocks - sum(other.floor for other in self.models.values())
        ceiling = left if ceiling is None else ceiling
        if not 0 <= floor <= ceiling <= left:
            raise ValueError(
                f"{model}: a floor of {floor} and a ceiling of {ceiling} pages; the other models' floors leave {left} of "
                f"{self.pages.num_blocks}: lower them"
            )
        assert model not in self.models, model
        for other in self.models.values():
            other.num_blocks = min(other.num_blocks, left + other.floor - floor)
        self.models[model] = ModelPool(self, model, floor, ceiling)
        return self.models[model]

    def close(self, model: str) -> None:
        """Its part goes, and with it all that it has cached. It must hold nothing."""
        part = self.models.pop(model)
        assert part.num_used == 0, f"{model} still holds {part.num_used} pages"
        part.on_evict = part.on_lost = None
        cached = self.held_by(part)
        self.pages.touch(cached)
        self.pages.forget(cached)
        self.pages.free(cached)
        for page in cached:
            self.leave(page)

    def allocate(self, taker: ModelPool, count: int) -> list[int]:
        """Pages for `taker`, which has seen to it that it may have them."""
        self._taker = taker
        pages = self.pages.allocate(count)
        for page in pages:
            self._holders[page] = taker
            if self._on_handover is not None:
                self._on_handover(page)
        return pages

    def _evicted(self, page: int, key: bytes) -> None:
        holder = self._holders[page]
        assert holder is not None, f"page {page} was cached for nobody"
        holder.lose(page, key, to_another=holder is not self._taker)

    def holder(self, page: int) -> ModelPool | None:
        """Whose page it is, referenced or cached."""
        return self._holders[page]

    def held_by(self, part: ModelPool) -> list[int]:
        """Its pages, referenced and cached."""
        return [page for page, holder in enumerate(self._holders) if holder is part]

    def leave(self, page: int) -> None:
        """Nobody holds it any more."""
        self._holders[page] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts the pool's invariants over all models' tables, and that all floors can be had."""
        self.pages.check_integrity(tables)
        for page, holder in enumerate(self._holders):
            used = self.pages.ref_count(page) > 0 or self.pages.is_cached(page)
            assert (holder is not None) == used, f"page {page} is {'nobody' if holder is None else holder.model}'s"
        assert self.pages.num_available >= sum(part.num_owed for part in self.models.values()), "a floor can't be had"
