"""The batcher on a runner that reads tokens back through the block tables: nothing that happens to a request changes its tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.worker.engine.batch import Batch
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import (
    EngineRequest,
    TokenOutput,
)
from services.worker.engine.sequence import MAX_PREEMPTIONS
from tests.drafters import Guesser, always, often_right
from tests.engine_harness import Key, alone, collect, drain, endings, endings_of, greedy, run, some_requests, tokens_of
from tests.fake_runner import fake_engine


@given(
    some_requests(),
    st.integers(14, 40),
    st.integers(1, 40),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 40),
    st.sampled_from([0, 1, 6, 100]),
    st.sampled_from([1, 3, 256]),
    st.sampled_from([0, 1, 3, 5, 8]),
)
@settings(max_examples=160, deadline=None)
def test_any_company_any_pool_any_chunk_any_drafts_same_tokens(
    requests: list[EngineRequest],
    num_blocks: int,
    max_step_tokens: int,
    max_sequences: int,
    prefix_cache: bool,
    host_blocks: int,
    swap_blocks: int,
    max_step_copies: int,
    max_drafts: int,
) -> None:
    """14 blocks of 4 hold any one of them: everything else is preemption, chunking, prefix hits of either tier and waiting."""
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        host_blocks=host_blocks,
        swap_blocks=swap_blocks,
        max_step_copies=max_step_copies,
    )
    together = endings_of(requests, config, max_drafts)
    assert together == alone(requests)
    assert len(together) == sum(request.n for request in requests)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are aborted and are stepped in any order, on a pool far too small for all."""

    @initialize(
        prefix_cache=st.booleans(),
        max_step_tokens=st.sampled_from([1, 3, 16, 200]),
        host_blocks=st.sampled_from([0, 3, 40]),
        swap_blocks=st.sampled_from([0, 5, 40]),
        max_step_copies=st.sampled_from([1, 2, 256]),
        max_drafts=st.sampled_from([0, 1, 8]),
    )
    def build(
        self, prefix_cache: bool, max_step_tokens: int, host_blocks: int, swap_blocks: int, max_step_copies: int, max_drafts: int
    ) -> None:
        self.engine = fake_engine(
            EngineConfig(
                num_blocks=16,
                block_size=4,
                max_step_tokens=max_step_tokens,
                max_sequences=5,
                prefix_cache=prefix_cache,
                host_blocks=host_blocks,
                swap_blocks=swap_blocks,
                max_step_copies=max_step_copies,
            ),
            speculator=always(max_drafts, Guesser(often_right)) if max_drafts else None,
        )
        self.added: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.now = 0.0
        self.outputs: dict[Key, TokenOutput] = {}

    @rule(requests=some_requests(max_size=2))
    def add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            fresh = EngineRequest(**{**vars(request), "request_id": f"r{len(self.added)}"})
            self.engine.add(fresh)
            self.added[fresh.request_id] = fresh

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.added)))
        self.engine.abort(request_id)
        assert request_id not in {live for live, _, _ in self.engine.progress()}
        self.engine.check_integrity()
        if any(
            (request_id, c) not in self.outputs or self.outputs[request_id, c].finish_reason is None
            for c in range(self.added[request_id].n)
        ):
            self.aborted.add(request_id)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 5.0  # as good as the time in which a weight doubles
            outputs = self.engine.step(self.now)
            assert not self.aborted & {output.request_id for output in outputs}, "news of an aborted request"
            collect(outputs, self.outputs)
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        drain(self.engine, self.outputs)
        whole = [request for request_id, request in self.added.items() if request_id not in self.aborted]
        assert {key: ending for key, ending in endings(self.outputs).items() if key[0] not in self.aborted} == alone(whole)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_b08_preempted_five_times_and_still_whole() -> None:
    """A pool for about three of eight long requests."""
    requests = [EngineRequest(f"r{i}", [i] * 9, greedy(40)) for i in range(8)]
    config = EngineConfig(num_blocks=3 * 13, block_size=4, max_step_tokens=64, max_sequences=8)
    engine = fake_engine(config)
    whole = run(engine, requests)
    assert endings(whole) == alone(requests)
    assert all(len(output.token_ids) == 40 for output in whole.values())
    counts = [output.num_preemptions for output in whole.values()]
    assert sum(counts) == engine.stats().num_preemptions > 0
    assert max(counts) <= MAX_PREEMPTIONS


def test_b26_the_youngest_gives_way_keeps_its_place_and_at_most_five_times() -> None:
    engine = fake_engine(EngineConfig(num_blocks=12, block_size=1, max_step_tokens=64, max_sequences=8))
    for index in range(6):
        engine.add(EngineRequest(f"r{index}", [index, index], greedy(9)))
    order: list[str] = []
    victims: dict[str, int] = {}
    while engine.has_work:
        running = list(engine.batcher.queue.running)
        outputs = engine.step(0.0)
        engine.check_integrity()
        order += [output.request_id for output in outputs if output.finish_reason]
        for sequence in running:
            victims[sequence.request_id] = sequence.num_preemptions
    assert order == [f"r{index}" for index in range(6)], "equals end in the order in which they came"
    assert victims["r0"] == 0, "the oldest never gives way to its equals"
    assert 0 < max(victims.values()) <= MAX_PREEMPTIONS


def test_one_that_was_preempted_too_often_waits_for_all_it_can_need() -> None:
    engine = fake_engine(EngineConfig(num_blocks=10, block_size=1, max_step_tokens=64))
    engine.add(EngineRequest("often", [1, 2], greedy(7)))
    engine.batcher.queue.waiting[0].num_preemptions = MAX_PREEMPTIONS
    engine.add(EngineRequest("young", [3], greedy(9)))
    engine.batcher.schedule(0.0)
    often = engine.batcher.queue.running[0]
    assert len(often.block_table) == often.max_computed_tokens == 8
    whole = drain(engine)
    assert often.num_preemptions == MAX_PREEMPTIONS
    assert {key[0]: len(tokens) for key, tokens in tokens_of(whole).items()} == {"often": 7, "young": 9}


def test_one_that_is_fully_reserved_gives_way_to_nobody() -> None:
    engine = fake_engine(EngineConfig(num_blocks=12, block_size=1, max_step_tokens=64))
    engine.add(EngineRequest("old", [1], greedy(10)))
    engine.add(EngineRequest("often", [2, 3], greedy(6)))
    engine.batcher.queue.waiting[1].num_preemptions = MAX_PREEMPTIONS
    counts = {}
    while engine.has_work:
        counts |= {output.request_id: output.num_preemptions for output in engine.step(0.0)}
        engine.check_integrity()
    assert counts == {"old": 1, "often": MAX_PREEMPTIONS}


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, ["small", "running", "large"]), (60.0, ["running", "large", "small"])])
def test_a_small_one_overtakes_a_large_one_until_that_has_waited_for_long(seconds: float, expected: list[str]) -> None:
    engine = fake_engine(EngineConfig(num_blocks=8, block_size=4, max_step_tokens=64))
    engine.add(EngineRequest("running", [1] * 12, greedy(5)))
    engine.step(0.0)
    engine.add(EngineRequest("large", [2] * 20, greedy(1)))
    engine.step(0.0)
    engine.add(EngineRequest("small", [3, 3], greedy(1)))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step(seconds) if output.finish_reason]
    assert order == expected


def test_a_lower_class_gives_way_first() -> None:
    engine = fake_engine(EngineConfig(num_blocks=8, block_size=1, max_step_tokens=64))
    engine.add(EngineRequest("batch", [1, 2], greedy(6), latency_class=3))
    engine.step(0.0)
    engine.add(EngineRequest("realtime", [3, 4], greedy(6), latency_class=1))
    while engine.has_work:
        if any(output.finish_reason for output in engine.step(0.0) if output.request_id == "realtime"):
            break
    (batch,) = [group.sequences[0] for group in engine.batcher.queue.requests.values()]
    assert batch.num_preemptions >= 1
    drain(engine)


def test_classes_then_arrival_decide_who_is_admitted() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_sequences=1))
    for index, latency_class in enumerate([3, 2, 1, 2, 1]):
        engine.add(EngineRequest(f"r{index}", [index], greedy(1), latency_class=latency_class))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step(0.0)]
    assert order == ["r2", "r4", "r1", "r3", "r0"]


def test_decoding_goes_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    spans: list[list[tuple[str, int]]] = []

    def watch(batch: Batch) -> None:
        spans.append([(span.sequence.request_id, span.length) for span in batch.spans])

    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_step_tokens=10), before_execute=watch)
    engine.add(EngineRequest("short", [1], greedy(8)))
    engine.step(0.0)
    engine.add(EngineRequest("long", list(range(40)), greedy(1)))
    drain(engine)
    assert spans[1:6] == [[("short", 1), ("long", 9)]] * 4 + [[("short", 1), ("long", 4)]]
