"""A watch below the engines of one arena: pages that nobody holds are overwritten, and each page knows whose tokens it was written with.

A page is poisoned (bytes 0xff: NaN in fp32 and bf16) when it is free, and again when a model gets it. So whoever reads what it didn't
write gets other tokens; and whoever reads what another model or org wrote is noted, even where the tokens are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from services.worker.engine.batch import Batch, Copy, Runner, Span, SpanResult
from services.worker.sharing.arena import Arena

POISON = 0xFF

Owner = tuple[str, bytes]  # model, salt of the org


@dataclass
class Ledger:
    """Who wrote which page of `pages`, uint8 [num_pages, bytes]."""

    pages: Tensor
    writers: dict[int, Owner] = field(default_factory=dict)
    foreign_reads: list[str] = field(default_factory=list)  # what must not be, in words
    num_reads: int = 0  # of whole pages that an earlier step, or another sequence, has written
    num_poisoned: int = 0
    _fresh: dict[int, Owner | None] = field(default_factory=dict)  # handed over, not poisoned yet: whose they were
    _clean: set[int] = field(default_factory=set)  # poisoned and not handed over since

    def handed_over(self, page: int) -> None:
        """For Arena: a model gets the page. What it held may still have to be copied to the host, even if the page goes on unused."""
        self._fresh.setdefault(page, self.writers.pop(page, None))

    def writer(self, page: int) -> Owner | None:
        """Of what the page holds at this moment."""
        return self._fresh[page] if page in self._fresh else self.writers.get(page)

    def poison_fresh(self, held: "set[int] | None" = None) -> None:
        """Those that were handed over, once what they held is saved. `held`: none but these."""
        for page in [page for page in self._fresh if held is None or page in held]:
            del self._fresh[page]
            self._poison(page)
            self._clean.discard(page)

    def poison_free(self, arena: Arena) -> None:
        """Between steps: all pages that nobody holds."""
        for page in range(len(self.pages)):
            if arena.holder(page) is None and page not in self._clean:
                self.writers.pop(page, None)
                self._poison(page)
                self._clean.add(page)

    def _poison(self, page: int) -> None:
        self.pages[page].fill_(POISON)
        self.num_poisoned += 1

    def note(self, owner: Owner, span: Span, block_size: int) -> None:
        """A span reads all pages before it and writes those of its own tokens."""
        for index, page in enumerate(span.sequence.block_table[: -(-span.end // block_size)]):
            reads, writer = index * block_size < span.start, self.writers.get(page)
            self.num_reads += reads
            if writer != owner and (reads or writer is not None):
                does = "reads" if reads else "writes over"
                self.foreign_reads.append(f"{span.sequence.request_id} of {owner} {does} page {page}, which {writer} wrote")
            self.writers[page] = owner
            self._clean.discard(page)


class WatchedRunner:
    """In the place of a model's runner. Implements Runner."""

    def __init__(self, inner: Runner, model: str, block_size: int, arena: Arena, ledger: Ledger) -> None:
        self.inner = inner
        self._model = model
        self._block_size = block_size
        self._arena = arena
        self._ledger = ledger
        self._slots: dict[int, Owner | None] = {}  # of its part of the host

    def copy(self, batch: Batch) -> None:
        """Out, then the pages that are its own now are poisoned, then in."""
        self._slots |= {copy.slot: self._ledger.writer(copy.block) for copy in batch.copies_out}
        self._copy(batch.copies_out, ())
        self._ledger.poison_fresh(self._own_pages())
        self._copy((), batch.copies_in)
        for copy in batch.copies_in:
            if (owner := self._slots.get(copy.slot)) is not None:
                self._ledger.writers[copy.block] = owner

    def _copy(self, out: tuple[Copy, ...], back: tuple[Copy, ...]) -> None:
        if out or back:
            self.inner.copy(Batch((), out, back))

    def _own_pages(self) -> set[int]:
        return set(self._arena.held_by(self._arena.models[self._model]))

    def execute(self, batch: Batch) -> list[SpanResult]:
        """As the inner one."""
        self._ledger.poison_fresh()
        for span in batch.spans:
            self._ledger.note((self._model, span.sequence.group.request.cache_salt), span, self._block_size)
        return self.inner.execute(batch)


def left_over(arena: Arena) -> Mapping[str, int]:
    """What an idle device still has, by name: all 0."""
    parts = arena.models.values()
    return {
        "pages": arena.pages.num_used,
        "claimed": sum(part.num_claimed for part in parts),
        "growing": sum(part.num_growing for part in parts),
    }
