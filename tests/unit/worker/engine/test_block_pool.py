"""The block pool keeps DESIGN 3's invariants whatever is asked of it, and keys tell identities apart."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.engine.block_pool import BlockPool, CacheIdentity, block_key, extend_keys


class BlockPoolMachine(RuleBasedStateMachine):
    """Block tables of imaginary sequences over a small alphabet of contents, so that keys meet often."""

    @initialize(num_blocks=st.integers(1, 12), keep_cached=st.booleans())
    def build(self, num_blocks: int, keep_cached: bool) -> None:
        self.pool = BlockPool(num_blocks, keep_cached=keep_cached)
        self.keep_cached = keep_cached
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # what a registered block holds, as far as we know

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_available:
            with pytest.raises(AssertionError, match="blocks wanted"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        taken = {block for table in self.tables for block in table}
        assert len(set(blocks)) == count
        assert not taken & set(blocks), "a referenced block was handed out again"
        for block in blocks:
            self.contents.pop(block, None)
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.integers(0, 6))
    def fill(self, data: st.DataObject, content: int) -> None:
        block = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        if block in self.contents:
            return  # full blocks are immutable
        key = block_key(b"", [content])
        self.pool.register(block, key)
        if self.pool.lookup([key]) == [block]:
            self.contents[block] = key

    @rule(contents=st.lists(st.integers(0, 6), max_size=4, unique=True))
    def share(self, contents: list[int]) -> None:
        keys = [block_key(b"", [content]) for content in contents]
        found = self.pool.lookup(keys)
        assert [self.contents[block] for block in found] == keys[: len(found)], "a key found a block with other content"
        before = self.pool.num_available
        taken = self.pool.num_unreferenced(found)
        self.pool.touch(found)
        assert self.pool.num_available == before - taken
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        if not self.keep_cached:
            held = {block for other in self.tables for block in other}
            self.contents = {block: key for block, key in self.contents.items() if block in held}

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.forget(table)
        for block in table:
            if (key := self.contents.pop(block, None)) is not None:
                assert self.pool.lookup([key]) == []

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_used + self.pool.num_available == self.pool.num_blocks
        if not self.keep_cached:
            assert self.pool.num_cached == 0

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.free(table)
            assert self.pool.num_available == self.pool.num_blocks


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


def _keyed(pool: BlockPool, contents: list[int]) -> tuple[list[int], list[bytes]]:
    blocks = pool.allocate(len(contents))
    keys: list[bytes] = []
    extend_keys(keys, b"root", contents, 1)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    return blocks, keys


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(6)
    old, old_keys = _keyed(pool, [1, 2, 3])
    new, new_keys = _keyed(pool, [4, 5, 6])
    pool.free(old)
    pool.free(new)
    pool.touch(pool.lookup(old_keys))
    pool.free(old)  # used again: now the newest
    pool.allocate(2)
    assert pool.lookup(new_keys) == new[:1]
    pool.allocate(2)
    assert pool.lookup(new_keys) == []
    assert pool.lookup(old_keys) == old[:2]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks, keys = _keyed(pool, [1, 2])
    pool.free(blocks)
    pool.allocate(2)
    assert pool.lookup(keys) == blocks


def test_a_block_freed_twice_is_our_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8))
def test_keys_grow_as_they_would_at_once(tokens: list[int], block_size: int) -> None:
    at_once: list[bytes] = []
    extend_keys(at_once, b"root", tokens, block_size)
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_keys(grown, b"root", tokens[:end], block_size)
    assert grown == at_once
    assert len(at_once) == len(tokens) // block_size
    assert len(set(at_once)) == len(at_once)


def test_a_key_stands_for_all_before_it() -> None:
    first: list[bytes] = []
    extend_keys(first, b"root", [1, 2, 3, 4], 2)
    second: list[bytes] = []
    extend_keys(second, b"root", [9, 2, 3, 4], 2)
    assert not set(first) & set(second)


_FIELD = st.sampled_from(["", "a", "b", "ab", "bc", "abc", "c", "\0", "\x01\0\0\0a"])


@given(st.tuples(_FIELD, _FIELD, _FIELD), st.tuples(_FIELD, _FIELD, _FIELD))
@example(("aversionb", "c", ""), ("a", "bversionc", ""))
@example(("", "aformatb", "c"), ("", "a", "bformatc"))
def test_b16_fields_that_concatenate_alike_differ(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    def root(fields: tuple[str, str, str]) -> bytes:
        salt, model_version, kv_format = fields
        return CacheIdentity(salt.encode(), model_version, kv_format).root_key()

    assert (root(one) == root(other)) == (one == other)


def test_b15_every_field_of_the_identity_counts() -> None:
    base = CacheIdentity(b"org", "v1", "fp32")
    others = [CacheIdentity(b"org2", "v1", "fp32"), CacheIdentity(b"org", "v2", "fp32"), CacheIdentity(b"org", "v1", "bf16")]
    for one, other in itertools.combinations([base, *others], 2):
        assert one.root_key() != other.root_key()
        assert block_key(one.root_key(), [1, 2]) != block_key(other.root_key(), [1, 2])
