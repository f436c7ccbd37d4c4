"""The host pool beside the device's: keys lead to what they stand for in both, and nothing that comes or goes changes a token."""

import dataclasses
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.engine.batch import Batch, Copy
from services.worker.engine.block_pool import BlockPool, CacheIdentity, extend_keys
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.host_pool import HostPool
from services.worker.engine.request import EngineRequest, FinishReason, SequenceError, TokenOutput
from tests.engine_harness import alone, drain, endings, greedy, run, some_requests
from tests.fake_runner import VOCAB_SIZE, FakeRunner, fake_engine

MANY = 256
IDENTITY = CacheIdentity(b"org", "version", "fp32")
FLOOD = [99] * 47  # all blocks of ROOM
ROOM = EngineConfig(num_blocks=12, block_size=4, max_step_tokens=64, host_blocks=64)


def chain(contents: list[int], identity: CacheIdentity = IDENTITY) -> list[bytes]:
    """Keys of blocks of one token each."""
    keys: list[bytes] = []
    extend_keys(keys, identity.root_key(), contents, 1)
    return keys


def held(host: HostPool, keys: list[bytes]) -> list[int]:
    """Slots of the longest prefix that the host knows, without taking them."""
    return host._slots.lookup(keys)


@dataclass
class Table:
    """A sequence's blocks, of which the first `num_found` weren't its own to compute."""

    keys: list[bytes]
    blocks: list[int]
    num_found: int


class TwoPools(RuleBasedStateMachine):
    """Sequences over a small alphabet are admitted, computed, released and distrusted as the batcher would; a page holds its key."""

    @initialize(num_blocks=st.integers(4, 10), num_slots=st.integers(0, 8), max_copies=st.integers(1, 9))
    def build(self, num_blocks: int, num_slots: int, max_copies: int) -> None:
        self.host = HostPool(num_slots, max_copies)
        self.pool = BlockPool(num_blocks, on_evict=self.host.keep)
        self.on_device: list[bytes | None] = [None] * num_blocks
        self.on_host: list[bytes | None] = [None] * num_slots
        self.computed: list[Table] = []
        self.admitted: list[Table] = []  # since the last step
        self.seen: set[bytes] = set()

    @rule(contents=st.lists(st.integers(0, 2), min_size=1, max_size=4), comes_back=st.booleans())
    def admit(self, contents: list[int], comes_back: bool) -> None:
        keys = chain(contents)
        hits = self.pool.lookup(keys)
        if len(keys) - len(hits) + self.pool.num_unreferenced(hits) > self.pool.num_available:
            return
        self.pool.touch(hits)
        slots = self.host.take(keys[len(hits) :]) if comes_back else []
        blocks = hits + self.pool.allocate(len(keys) - len(hits))
        found = range(len(hits), len(hits) + len(slots))
        self.host.copy_in(slots, [blocks[index] for index in found])
        for index in found:
            self.pool.register(blocks[index], keys[index])
        self.admitted.append(Table(keys, blocks, len(hits) + len(slots)))
        self.seen |= set(keys)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.free(self.computed.pop(data.draw(st.integers(0, len(self.computed) - 1))).blocks)

    @rule(data=st.data(), fails=st.booleans())
    def step(self, data: st.DataObject, fails: bool) -> None:
        for block, slot in self.host.copies_out:
            self.on_host[slot] = self.on_device[block]
        for block, slot in self.host.copies_in:
            self.on_device[block] = self.on_host[slot]
        for table in self.admitted:
            found = table.blocks[: table.num_found]
            assert [self.on_device[block] for block in found] == table.keys[: table.num_found], "a found block has other content"
        if fails and self.admitted:
            table = self.admitted.pop(data.draw(st.integers(0, len(self.admitted) - 1)))
            self.pool.forget(table.blocks)
            self.host.forget(table.keys)
            self.pool.free(table.blocks)
            assert not any(held(self.host, [key]) for key in table.keys)
        for table in self.admitted:
            for key, block in list(zip(table.keys, table.blocks, strict=True))[table.num_found :]:
                self.on_device[block] = key
                self.pool.register(block, key)
        self.computed += self.admitted
        self.admitted = []
        self.host.settle()

    @invariant()
    def every_key_leads_to_its_page(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity([table.blocks for table in self.computed + self.admitted])
        self.host.check_integrity()
        assert self.host.num_held <= self.host.num_slots
        written = {copy.slot for copy in self.host.copies_out}, {copy.block for copy in self.host.copies_in}
        for key in self.seen:
            assert all(self.on_host[slot] == key or slot in written[0] for slot in held(self.host, [key]))
            assert all(self.on_device[block] == key or block in written[1] for block in self.pool.lookup([key]))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.host.settle()
            self.host.check_integrity()
            for table in self.computed + self.admitted:
                self.pool.free(table.blocks)
            assert self.pool.num_available == self.pool.num_blocks


TwoPools.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTwoPools = TwoPools.TestCase


def keep(host: HostPool, contents: list[int]) -> list[bytes]:
    """The keys of a sequence whose blocks the device evicts, in its order: tail first."""
    keys = chain(contents)
    for block, key in reversed(list(enumerate(keys))):
        host.keep(block, key)
    host.settle()
    return keys


def test_the_least_recently_used_slot_goes_first_and_tails_before_heads() -> None:
    host = HostPool(4, MANY)
    old, new = keep(host, [1, 2]), keep(host, [3, 4])
    host.copy_in(host.take(old), [0, 1])
    host.settle()  # read again: now the newest
    keep(host, [5])
    assert (len(held(host, old)), len(held(host, new))) == (2, 1)
    keep(host, [6, 7])
    assert (len(held(host, old)), len(held(host, new))) == (1, 0)


def test_what_the_host_has_already_is_not_copied_but_used() -> None:
    host = HostPool(2, MANY)
    first, second = keep(host, [1]), keep(host, [2])
    host.keep(9, first[0])
    assert host.copies_out == []
    keep(host, [3])
    assert (len(held(host, first)), len(held(host, second))) == (1, 0)


def test_a_slot_that_a_copy_reads_or_writes_is_not_given_away() -> None:
    host = HostPool(2, MANY)
    taken, going = keep(host, [1]), chain([2, 3])
    host.copy_in(host.take(taken), [5])
    host.keep(1, going[1])
    host.keep(0, going[0])  # one slot is left for both: the head has it
    assert held(host, taken) == [copy.slot for copy in host.copies_in]
    assert held(host, going) == [copy.slot for copy in host.copies_out]
    returning = host.take(going)
    host.copy_in(returning, [6])
    host.keep(2, chain([4])[0])  # no slot is left for it: both are read in this step
    assert host.copies_out == [Copy(0, returning[0])]
    host.settle()
    host.check_integrity()
    keep(host, [4, 5])
    assert held(host, taken) == held(host, going) == []


def test_a_step_that_evicts_more_than_it_may_copy_keeps_the_heads() -> None:
    """And makes no copy for the tails."""
    host = HostPool(8, 3)
    keys = chain([1, 2, 3, 4, 5])
    for block in (4, 3, 2, 1, 0):
        host.keep(block, keys[block])
        host.check_integrity()
    assert [copy.block for copy in host.copies_out] == [2, 1, 0]
    host.settle()
    assert len(held(host, keys)) == host.num_held == 3


def test_a_step_takes_no_more_slots_than_it_may_copy_and_the_next_finds_the_rest() -> None:
    host = HostPool(4, 2)
    keep(host, [1])
    long = chain([7, 8, 9])
    for block in (2, 1, 0):
        host.keep(block, long[block])
        host.settle()
    keep(host, [1])  # used later
    slots = host.take(long)
    assert slots == held(host, long)[:2]
    host.copy_in(slots, [1, 2])
    assert host.take(long) == [], "this step has made its copies"
    host.settle()
    keep(host, [4])
    assert (len(held(host, chain([1]))), len(held(host, long))) == (0, 3), "what was asked for is used, even where it comes later"


def test_without_slots_nothing_is_kept() -> None:
    host = HostPool(0, MANY)
    keys = keep(host, [1, 2])
    assert (host.copies_out, host.take(keys), host.num_held) == ([], [], 0)


# --- promises


def test_what_is_promised_is_kept_wherever_it_lies_and_given_up_for_nothing() -> None:
    host = HostPool(2, MANY, num_swappable=4)
    on_host, on_device = keep(host, [1]), chain([2, 3])
    slots = host.promise([*on_host, *on_device], [7])
    assert slots is not None
    assert host.copies_out == [Copy(7, slots[0])]
    keep(host, [4, 5, 6, 7, 8])  # the tier has two slots left, and one until the device gives promised ones away
    host.keep(0, on_device[0])
    host.keep(1, on_device[1])
    host.settle()
    assert len(held(host, on_host)) == 1
    assert len(held(host, on_device)) == 2
    host.break_promise([*on_host, *on_device], slots)
    host.check_integrity()
    keep(host, [10, 11, 12, 13, 14, 15])
    assert held(host, on_host) == held(host, on_device) == []


def test_a_promise_that_has_no_room_takes_nothing() -> None:
    host = HostPool(0, MANY, num_swappable=3)
    keys = chain([1, 2])
    assert host.promise(keys, [5]) is not None
    assert host.promise(keys, [6]) is None
    assert host.promise(chain([3]), []) is None
    assert host.promise(keys, []) == [], "what is promised already costs nothing"
    assert host.num_swapped == 3
    host.settle()


def test_a_step_reads_no_slot_that_a_promise_may_need() -> None:
    host = HostPool(1, MANY, num_swappable=2)
    cached = keep(host, [1, 2, 3])
    assert host.promise(chain([8, 9]), []) == []
    assert len(host.take(cached)) == 1
    assert host.count(cached) == 3, "the others are there until they are needed"


def test_without_a_tier_nothing_outlasts_its_promise() -> None:
    host = HostPool(0, MANY, num_swappable=2)
    keys = chain([1])
    slots = host.promise(keys, [4])
    assert slots is not None
    host.keep(3, keys[0])
    host.keep(2, chain([9])[0])  # promised to nobody
    assert len(host.copies_out) == 2
    host.settle()
    host.break_promise(keys, slots)
    assert host.num_held == 0


# --- key identity

_FIELD = st.sampled_from(["", "a", "b", "ab", "fp32", "bf16"])
_IDENTITY = st.builds(CacheIdentity, _FIELD.map(str.encode), _FIELD, _FIELD)


@given(_IDENTITY, _IDENTITY, st.sampled_from([field.name for field in dataclasses.fields(CacheIdentity)]))
def test_b15_the_host_finds_a_block_by_the_whole_identity_only(one: CacheIdentity, other: CacheIdentity, name: str) -> None:
    """Evicted from the device, asked for by another identity: one that differs in every drawn way, and one that differs in one field."""
    host = HostPool(8, MANY)
    pool = BlockPool(2, on_evict=host.keep)
    keys = chain([1, 2], one)
    blocks = pool.allocate(2)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.free(blocks)
    pool.allocate(2)
    assert (len(pool.lookup(keys)), len(held(host, keys))) == (0, 2)
    for asking in (other, dataclasses.replace(one, **{name: getattr(other, name)})):
        assert bool(held(host, chain([1, 2], asking))) == (asking == one)


@pytest.mark.parametrize(
    ("salt", "model", "kv_format", "cached"),
    [(b"a", "m", "fp32", 12), (b"b", "m", "fp32", 0), (b"a", "n", "fp32", 0), (b"a", "m", "bf16", 0)],
)
def test_b15_no_other_org_model_or_format_is_served_from_the_host(salt: bytes, model: str, kv_format: str, cached: int) -> None:
    """Two engines on one host pool, the second one's device empty."""
    prompt = list(range(16))
    first = fake_engine(dataclasses.replace(ROOM, kv_format="fp32"), model="m")
    finish(first, EngineRequest("warm", prompt, greedy(1), cache_salt=b"a"))
    finish(first, EngineRequest("flood", FLOOD, greedy(1)))
    assert first.stats().num_held_host_blocks == 4
    second = fake_engine(dataclasses.replace(ROOM, kv_format=kv_format), model=model)
    assert isinstance(first.runner, FakeRunner)
    assert isinstance(second.runner, FakeRunner)
    second.batcher.tables.host, second.runner.host_slots = first.batcher.tables.host, first.runner.host_slots
    assert finish(second, EngineRequest("asks", prompt, greedy(1), cache_salt=salt)).num_cached_tokens == cached


# --- in the engine


def finish(engine: Engine, request: EngineRequest) -> TokenOutput:
    """The whole output of a request of one choice."""
    return run(engine, [request])[request.request_id, 0]


def conversations(count: int, length: int = 20) -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", [i, *range(100, 100 + length)], greedy(8)) for i in range(count)]


def test_what_the_device_evicts_comes_back_from_the_host() -> None:
    """Six conversations on a device that holds one: each second turn finds all that it can."""
    engine = fake_engine(ROOM)
    for _ in range(2):
        assert endings(run(engine, conversations(6))) == alone(conversations(6))
    stats = engine.stats()
    assert stats.num_host_hit_tokens == stats.num_copied_in_blocks * 4 > 0
    assert stats.num_prefix_hit_tokens + stats.num_host_hit_tokens == 6 * 20
    assert stats.num_host_query_tokens == stats.num_prefix_query_tokens - stats.num_prefix_hit_tokens
    assert stats.num_copied_out_blocks >= stats.num_held_host_blocks > 0
    assert stats.num_host_blocks == 64


def test_a_long_prompt_comes_back_over_several_steps_and_nobody_waits_for_it() -> None:
    """Ten blocks at two a step, beside one that decodes; then the token that is left. None of it is computed again."""
    config = EngineConfig(num_blocks=24, block_size=4, max_step_tokens=64, host_blocks=64, max_step_copies=2)
    steps: list[dict[str, int]] = []
    engine = fake_engine(config, before_execute=lambda batch: steps.append({s.sequence.request_id: s.length for s in batch.spans}))
    request = EngineRequest("long", list(range(41)), greedy(3))
    finish(engine, request)
    finish(engine, EngineRequest("flood", [99], greedy(96)))  # all blocks, and one at a time
    engine.add(EngineRequest("beside", [7], greedy(20)))
    engine.step(0.0)
    engine.add(request)
    steps.clear()
    before = engine.stats()
    assert endings(drain(engine))["long", 0] == alone([request])["long", 0]
    assert steps[:5] == [{"beside": 1}] * 4 + [{"beside": 1, "long": 1}]
    after = engine.stats()
    assert after.num_copied_in_blocks - before.num_copied_in_blocks == 10
    assert after.num_host_hit_tokens - before.num_host_hit_tokens == 40


@pytest.mark.parametrize("max_step_copies", [1, 3])
def test_no_step_copies_more_than_it_may_each_way(max_step_copies: int) -> None:
    """Conversations on a device that holds one of them; a step may be nothing but copies."""
    config = dataclasses.replace(ROOM, max_step_copies=max_step_copies)
    engine = fake_engine(config)
    batches: list[Batch] = []
    copy = engine.runner.copy

    def watched(batch: Batch) -> None:
        batches.append(batch)
        copy(batch)

    engine.runner.copy = watched  # type: ignore[method-assign]
    for _ in range(3):
        assert endings(run(engine, conversations(3))) == alone(conversations(3))
    assert max(len(batch.copies_out) for batch in batches) == max_step_copies
    assert max(len(batch.copies_in) for batch in batches) == max_step_copies
    assert any(not batch.spans for batch in batches)


def test_hits_of_both_tiers_are_cached_tokens_of_the_request() -> None:
    engine = fake_engine(ROOM)
    prompt = list(range(16))
    finish(engine, EngineRequest("warm", prompt, greedy(1)))
    finish(engine, EngineRequest("flood", FLOOD, greedy(1)))
    assert finish(engine, EngineRequest("half", prompt[:9], greedy(1))).num_cached_tokens == 8
    before = engine.stats()
    assert finish(engine, EngineRequest("whole", prompt, greedy(1))).num_cached_tokens == 12
    after = engine.stats()
    assert after.num_prefix_hit_tokens - before.num_prefix_hit_tokens == 8
    assert after.num_host_hit_tokens - before.num_host_hit_tokens == 4


def test_two_that_are_admitted_together_share_what_comes_back() -> None:
    engine = fake_engine(ROOM)
    prompt = list(range(16))
    finish(engine, EngineRequest("warm", prompt, greedy(1)))
    finish(engine, EngineRequest("flood", FLOOD, greedy(1)))
    requests = [EngineRequest(f"r{i}", [*prompt, i], greedy(3)) for i in range(2)]
    assert endings(run(engine, requests)) == alone(requests)
    assert engine.stats().num_copied_in_blocks == 4


def test_preempted_sequences_come_back_from_the_host() -> None:
    """Their full blocks are evicted like any others, and needn't be computed again."""
    requests = [EngineRequest(f"r{i}", [i] * 9, greedy(40)) for i in range(8)]
    computed = []
    for host_blocks in (0, 200):
        engine = fake_engine(EngineConfig(num_blocks=39, block_size=4, max_step_tokens=64, max_sequences=8, host_blocks=host_blocks))
        assert endings(run(engine, requests)) == alone(requests)
        assert engine.stats().num_preemptions > 0
        computed.append(engine.stats().num_computed_tokens)
    assert engine.stats().num_copied_in_blocks > 0
    assert computed[1] < computed[0]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 7)), max_size=4), some_requests(), st.integers(0, 30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_requests_that_fail_before_or_while_computing_leave_the_others_right(
    faults: list[tuple[int, int]], requests: list[EngineRequest], host_blocks: int, again: bool
) -> None:
    """The batch is run once more without the culprit, but its copies are not."""
    num_calls = 0

    def fail(batch: Batch) -> None:
        nonlocal num_calls
        num_calls += 1
        for call, index in faults:
            if call == num_calls:
                raise SequenceError(batch.spans[index % len(batch.spans)].sequence.request_id, 0, "cosmic ray")

    config = EngineConfig(num_blocks=16, block_size=4, max_step_tokens=20, max_sequences=5, host_blocks=host_blocks)
    engine = fake_engine(config, before_execute=fail)
    for number in range(1 + again):
        renamed = [dataclasses.replace(request, request_id=f"{request.request_id}/{number}") for request in requests]
        expected = alone(renamed)
        for key, ending in endings(run(engine, renamed)).items():
            assert ending[1] is FinishReason.ERROR or ending == expected[key]


def test_what_a_failed_request_computed_comes_back_from_nowhere() -> None:
    """A faulty block may lie on the host, too."""

    def fail(batch: Batch) -> None:
        if batch.spans[0].sequence.request_id == "bad":
            raise SequenceError("bad", 0, "NaN")

    engine = fake_engine(ROOM, before_execute=fail)
    prompt = list(range(16))
    finish(engine, EngineRequest("warm", prompt, greedy(1)))
    finish(engine, EngineRequest("flood", FLOOD, greedy(1)))
    finish(engine, EngineRequest("bad", prompt, greedy(8)))
    assert engine.stats().num_copied_in_blocks == 3
    assert finish(engine, EngineRequest("good", prompt, greedy(1))).num_cached_tokens == 0


@pytest.mark.parametrize("after", range(12))
def test_abort_leaves_no_slot_referenced_in_any_state(after: int) -> None:
    """Waiting, just come back from the host, decoding, preempted: `drain` checks that each step settles its copies."""
    engine = fake_engine(EngineConfig(num_blocks=10, block_size=4, max_step_tokens=16, max_sequences=3, host_blocks=30))
    run(engine, conversations(4))
    for request in conversations(4):
        engine.add(request)
    for _ in range(after):
        engine.step(0.0)
    for index in (0, 2):
        engine.abort(f"r{index}")
        engine.check_integrity()
    drain(engine)
    assert engine.batcher.tables.host._slots.num_used == 0


class _Bus(FakeRunner):
    """A runner on which time passes: a second per page, and `token_seconds` per computed token."""

    def __init__(self, config: EngineConfig, token_seconds: float) -> None:
        super().__init__(config.num_blocks, config.block_size, host_blocks=config.num_host_slots, before_execute=self._compute)
        self.now = 0.0
        self.token_seconds = token_seconds

    def copy(self, batch: Batch) -> None:
        self.now += batch.num_copies
        super().copy(batch)

    def _compute(self, batch: Batch) -> None:
        self.now += self.token_seconds * batch.num_tokens


@pytest.mark.parametrize(("token_seconds", "pays"), [(0.2, False), (0.3, True)])  # a block's 4 tokens: 0.8 or 1.2 seconds
def test_blocks_come_back_where_that_is_cheaper_than_computing_them(token_seconds: float, pays: bool) -> None:
    runner = _Bus(ROOM, token_seconds)
    engine = Engine(runner, ROOM, vocab_size=VOCAB_SIZE, clock=lambda: runner.now)
    for _ in range(2):
        for index in range(4):
            engine.add(EngineRequest(f"r{index}", [index] * 21, greedy(4)))
            drain(engine)
        assert engine.stats().num_copied_out_blocks > 0
    assert (engine.stats().num_host_hit_tokens > 0) == pays
