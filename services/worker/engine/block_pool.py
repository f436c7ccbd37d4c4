"""Which blocks are used, free or cached, and the keys that name cached content. Block numbers only: it knows no tensors or sequences.

A block is referenced (ref count > 0), cached (unreferenced, but its key still finds it; evicted least recently used first) or free.
A keyed block is full and immutable.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CacheIdentity:
    """All that must be equal, besides the tokens, for one sequence to read another's blocks."""

    cache_salt: bytes
    model_version: str
    kv_format: str

    def root_key(self) -> bytes:
        """Parent of a sequence's first block: 32 bytes."""
        return _digest((b"salt", self.cache_salt), (b"version", self.model_version.encode()), (b"format", self.kv_format.encode()))


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block behind `parent`: 32 bytes that stand for every token up to its end and, through the root, for the identity."""
    return _digest((b"parent", parent), (b"tokens", struct.pack(f"<{len(token_ids)}i", *token_ids)))


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Appends the keys of the full blocks of `tokens` that `keys` lacks."""
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        keys.append(block_key(keys[-1] if keys else root, tokens[start : start + block_size]))


def _digest(*fields: tuple[bytes, bytes]) -> bytes:
    # Tag and length before each field: no two lists of fields flatten to the same bytes.
    digest = hashlib.sha256()
    for tag, value in fields:
        digest.update(struct.pack("<II", len(tag), len(value)) + tag + value)
    return digest.digest()


OnEvict = Callable[[int, bytes], None]


class Pool(Protocol):
    """The blocks of one engine: all of a BlockPool, or its part of a pool that several engines share (sharing.arena). See BlockPool."""

    on_evict: OnEvict | None

    @property
    def is_shared(self) -> bool:
        """Whether others may hold the blocks that nobody here does."""
        ...

    @property
    def num_blocks(self) -> int:
        """Most blocks that can be held."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now."""
        ...

    @property
    def num_withheld(self) -> int:
        """Of the available, those that newcomers leave to other engines."""
        ...

    @property
    def num_used(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def ref_count(self, block: int) -> int: ...
    def allocate(self, count: int) -> list[int]: ...
    def free(self, blocks: Sequence[int]) -> None: ...
    def lookup(self, keys: Iterable[bytes]) -> list[int]: ...
    def find(self, key: bytes) -> int | None: ...
    def finds(self, block: int, key: bytes) -> bool: ...
    def num_unreferenced(self, blocks: Iterable[int]) -> int: ...
    def touch(self, blocks: Iterable[int]) -> None: ...
    def register(self, block: int, key: bytes) -> None: ...
    def forget(self, blocks: Iterable[int]) -> None: ...
    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None: ...


class SharedPool(Pool, Protocol):
    """One engine's part of a pool that several engines share."""

    on_lost: Callable[[], None] | None
    """Called when another engine has taken what `on_evict` was told of: it writes there as soon as this returns."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1. With keep_cached False a block's key dies with its last reference: sharing among the living only.

    `on_evict` hears of each cached block, and its key, that is given away while its content is still there.
    """

    def __init__(self, num_blocks: int, *, keep_cached: bool = True, on_evict: OnEvict | None = None) -> None:
        self.is_shared = False
        self.num_blocks = num_blocks
        self.num_withheld = 0
        self.on_evict = on_evict
        self._keep_cached = keep_cached
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest
        self._cached: dict[int, None] = {}  # unreferenced and keyed, least recently used first
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that still answer to a key; they can be allocated, too."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing that anybody could find."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """`count` private blocks; evicts cached ones where too few are free. The caller has seen to it that there are enough."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        blocks = []
        for _ in range(count):
            if not self._free:
                oldest = next(iter(self._cached))
                if self.on_evict is not None:
                    self.on_evict(oldest, self._key_of_block[oldest])
                self._evict(oldest)
            blocks.append(block := self._free.pop())
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each. The last blocks of a sequence are evicted first: without its head a tail is worthless."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if block in self._key_of_block:
                self._cached[block] = None
                if not self._keep_cached:
                    self._evict(block)
            else:
                self._free.append(block)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `keys`. Takes no reference: `touch` them before anything else is allocated."""
        blocks = []
        for key in keys:
            if (block := self._block_of_key.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block that answers to it. See `lookup`."""
        return self._block_of_key.get(key)

    def finds(self, block: int, key: bytes) -> bool:
        """Whether `key` leads to that very block, and goes on to while nobody references it."""
        return self._keep_cached and self._block_of_key.get(key) == block

    def is_cached(self, block: int) -> bool:
        """Whether it is unreferenced and answers to a key."""
        return block in self._cached

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` touching would take out of what is available."""
        return sum(block in self._cached for block in blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each found block."""
        for block in blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Lets `key` find `block`, which is full and computed. Where another block holds that content already, it stays private."""
        assert self._ref_counts[block] > 0, f"block {block} registered without a reference"
        if key not in self._block_of_key and block not in self._key_of_block:
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """No key finds these referenced blocks any more: their content is suspect. Whoever shares them keeps them."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} forgotten without a reference"
            if (key := self._key_of_block.pop(block, None)) is not None:
                del self._block_of_key[key]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is in exactly one place and is referenced as often as `tables` (all block tables) name it."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._ref_counts, f"ref counts {self._ref_counts} but the block tables say {counts}"
        referenced = {block for block, count in enumerate(counts) if count}
        places = [*referenced, *self._free, *self._cached]
        assert sorted(places) == list(range(self.num_blocks)), "referenced + free + cached are not all blocks once"
        assert {block: key for key, block in self._block_of_key.items()} == self._key_of_block, "keys and blocks disagree"
        assert all(block in self._key_of_block for block in self._cached), "a cached block has no key"
        assert not any(block in self._key_of_block for block in self._free), "a free block has a key"

    def _evict(self, block: int) -> None:
        del self._cached[block]
        del self._block_of_key[self._key_of_block.pop(block)]
        self._free.append(block)
