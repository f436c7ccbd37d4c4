"""What an engine tells of a request: its events in order, phases that sum to its time there, all of it bounded."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineRequest
from services.worker.engine.timeline import FEW_EVENTS, MAX_EVENTS, Event, Kind, Phase, Snapshot, Timeline
from tests.engine_harness import greedy, some_requests
from tests.fake_runner import fake_engine


def _run(engine: Engine, now: float = 0.0) -> dict[str, Snapshot]:
    """The last word on each request; a step takes a second of the loop's time."""
    told: dict[str, Snapshot] = {}
    while engine.has_work:
        told |= {output.request_id: output.timeline for output in engine.step(now) if output.timeline is not None}
        now += 1.0
    return told


def _kinds(snapshot: Snapshot, choice_index: int = 0) -> list[Kind]:
    return [event.kind for event in snapshot.events if event.choice_index == choice_index]


def test_a_prompt_in_chunks_and_its_tokens() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_step_tokens=8))
    engine.add(EngineRequest("a", list(range(20)), greedy(5)))
    told = _run(engine)["a"]
    assert _kinds(told) == [Kind.ADMITTED, Kind.PREFILL, Kind.PREFILL, Kind.PREFILL, Kind.FIRST_TOKEN, Kind.ENDED]
    assert [(event.num_tokens, event.num_chunks) for event in told.events if event.kind is Kind.PREFILL] == [(8, 1), (8, 1), (4, 1)]
    assert told.events[-1].num_tokens == 5
    assert told.seconds == (0, 0, 2, 4), "the third chunk's step yields the first token; the fake clock stands within steps"


def test_hits_of_the_cache_are_told_with_the_admission() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_step_tokens=64))
    for name in "ab":
        engine.add(EngineRequest(name, list(range(20)), greedy(2)))
        told = _run(engine)[name]
        assert told.events[0].num_cached_tokens == (0 if name == "a" else 16)
        assert told.events[1].num_tokens == (20 if name == "a" else 4)


def test_who_waits_for_a_slot_is_told_to_wait() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_sequences=1))
    for name in "ab":
        engine.add(EngineRequest(name, [ord(name)], greedy(4)))
    told = _run(engine)
    assert told["a"].seconds == (0, 0, 0, 3)
    assert told["b"].seconds == (4, 0, 0, 3)


def test_a_preemption_by_class_and_what_it_cost() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_sequences=1))
    engine.add(EngineRequest("batch", list(range(9)), greedy(6), latency_class=3))
    engine.step(0.0)
    engine.step(1.0)
    engine.add(EngineRequest("realtime", [1], greedy(3), latency_class=1))
    told = _run(engine, 2.0)["batch"]
    kinds = _kinds(told)
    assert kinds[:3] == [Kind.ADMITTED, Kind.PREFILL, Kind.FIRST_TOKEN]
    assert kinds[3] is Kind.PREEMPTED_BY_CLASS
    assert kinds[4] in (Kind.SWAPPED, Kind.RECOMPUTED)
    assert kinds[5:7] == [Kind.RESUMED, Kind.PREFILL]
    assert kinds[-1] is Kind.ENDED
    assert told.seconds[Phase.PREEMPTED] == 3
    assert told.events[4].num_tokens == 10


def test_choices_one_after_another_are_one_request() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_sequences=1))
    engine.add(EngineRequest("a", [1, 2, 3], greedy(3), n=3))
    told = _run(engine)["a"]
    assert all(_kinds(told, choice)[-1] is Kind.ENDED for choice in range(3))
    assert sum(told.seconds) == told.events[-1].at - told.began
    assert told.seconds[Phase.DECODE] == 6, "while a choice decodes the request does, though others wait"


def test_an_aborted_request_says_nothing_and_leaves_nothing() -> None:
    engine = fake_engine()
    engine.add(EngineRequest("a", [1], greedy(9)))
    engine.step(0.0)
    engine.abort("a")
    assert not engine.has_work


@settings(max_examples=40)
@given(some_requests(), st.integers(1, 3), st.booleans())
def test_phases_sum_to_the_whole_and_events_are_in_order(requests: list[EngineRequest], num_slots: int, class_preemption: bool) -> None:
    ticks = iter(range(10**9))
    config = EngineConfig(num_blocks=24, block_size=4, max_sequences=num_slots, max_step_tokens=8, class_preemption=class_preemption)
    engine = fake_engine(config, clock=lambda: next(ticks) / 1000)
    for request in requests:
        engine.add(request)
    for told in _run(engine).values():
        last = told.events[-1]
        assert last.kind is Kind.ENDED
        assert abs(sum(told.seconds) - (last.at - told.began)) < 1e-6
        assert min(told.seconds) >= 0
        assert all(one.at <= other.at for one, other in pairwise(told.events))
        assert len(told.events) <= MAX_EVENTS


def test_chunks_are_joined_and_the_rest_is_counted_but_for_ends() -> None:
    timeline = Timeline()
    timeline.begin(1, 0.0)
    for number in range(1000):
        timeline.note(Event(Kind.PREFILL, number, 0, 8, 0, 1))
    assert len(timeline.events) == FEW_EVENTS
    assert sum(event.num_tokens for event in timeline.events) == 8000
    assert sum(event.num_chunks for event in timeline.events) == 1000
    for number in range(1000):
        timeline.note(Event(Kind.RESUMED, number, 0))
    for choice in range(16):
        timeline.note(Event(Kind.ENDED, 2000, choice))
    assert [event.kind for event in timeline.events[-16:]] == [Kind.ENDED] * 16
    assert len(timeline.events) == MAX_EVENTS
    assert timeline.num_dropped_events == 1000 - (MAX_EVENTS - 16 - FEW_EVENTS)
