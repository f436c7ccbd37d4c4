"""Which models are brought ahead, and where to: by what waits, by loads, within what may give way."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.policy.placement import (
    FLOOR,
    HOLD_PER_LOAD,
    LEAST_HOLD_SECONDS,
    Demand,
    Device,
    Entry,
    Prefetch,
    could_come,
    decide,
    load,
)

HERE = Entry(is_on_device=True, num_bytes=1, tokens_per_second=100.0, load_seconds=1.0)
AWAY = replace(HERE, is_on_device=False)
WAITS = Demand(num_waiting=3, oldest_seconds=2.0)


def device(name: str = "w1", num_places: int = 2, **entries: Entry) -> Device:
    return Device(name, num_places, entries)


def prefetches(devices: list[Device], now: float = 0.0, **demands: Demand) -> list[tuple[str, str]]:
    return [(p.worker_id, p.model) for p in decide(devices, demands, now).prefetches]


def test_what_waits_and_is_on_no_device_comes() -> None:
    assert prefetches([device(a=HERE, b=AWAY)], b=WAITS) == [("w1", "b")]
    assert prefetches([device(a=HERE, b=AWAY)], b=Demand(tokens_per_second=50.0)) == []
    assert prefetches([device(a=HERE, b=AWAY), device("w2", b=HERE)], b=WAITS) == []
    assert prefetches([device(a=HERE)], b=WAITS) == [], "nobody serves it"


@pytest.mark.parametrize(
    "kept", [replace(HERE, pinned=True), replace(HERE, num_requests=1), replace(HERE, stay_seconds=0.1)], ids=["pinned", "busy", "new"]
)
def test_what_may_not_go_stays(kept: Entry) -> None:
    assert prefetches([device(num_places=1, a=HERE, b=AWAY)], b=WAITS) == [("w1", "b")]
    assert prefetches([device(num_places=1, a=kept, b=AWAY)], b=WAITS) == []


@pytest.mark.parametrize("there", [replace(AWAY, failed=True), replace(AWAY, movable=False), replace(AWAY, num_bytes=3)])
def test_what_can_t_come_isn_t_asked_for(there: Entry) -> None:
    assert prefetches([device(a=HERE, b=there)], b=WAITS) == []


def test_it_goes_where_least_is_going_on_and_then_where_it_comes_soonest() -> None:
    near = replace(AWAY, load_seconds=0.5)
    demands = {"a": Demand(tokens_per_second=50.0), "b": WAITS}
    assert prefetches([device("w1", a=HERE, b=near), device("w2", a=AWAY, b=AWAY)], **demands) == [("w2", "b")]
    assert prefetches([device("w1", b=AWAY), device("w2", b=near)], b=WAITS) == [("w2", "b")]


def test_one_model_at_a_time_comes_to_a_device_who_waits_longest_first() -> None:
    demands = {"a": Demand(num_waiting=9, oldest_seconds=1.0), "b": Demand(num_waiting=1, oldest_seconds=5.0)}
    assert prefetches([device(a=AWAY, b=AWAY)], **demands) == [("w1", "b")]
    assert prefetches([device("w1", a=AWAY, b=AWAY), device("w2", a=AWAY, b=AWAY)], **demands) == [("w1", "b"), ("w2", "a")]


@pytest.mark.parametrize("load_seconds", [0.1, 10.0])
def test_it_isn_t_asked_for_again_at_once_nor_elsewhere(load_seconds: float) -> None:
    asked = replace(AWAY, asked_at=100.0, load_seconds=load_seconds)
    hold = max(LEAST_HOLD_SECONDS, HOLD_PER_LOAD * load_seconds)
    devices = [device("w1", b=asked), device("w2", b=AWAY)]
    assert prefetches(devices, 100.0 + hold - 0.1, b=WAITS) == []
    assert prefetches(devices, 100.0 + hold, b=WAITS) != []


def test_load_is_the_sum_of_lambda_over_mu_shared() -> None:
    half = replace(HERE, share=0.5)
    demands = {"a": Demand(tokens_per_second=20.0), "b": Demand(tokens_per_second=30.0)}
    assert load(device(a=HERE, b=half), demands, {"a": 1, "b": 1}) == pytest.approx(20 / 100 + 30 / 50)
    assert load(device(a=HERE, b=half), demands, {"a": 2, "b": 1}) == pytest.approx(10 / 100 + 30 / 50)
    assert load(device(a=HERE, b=AWAY), demands, {"a": 1, "b": 0}) == pytest.approx(20 / 100)
    assert load(device(a=replace(HERE, tokens_per_second=0.0)), demands, {"a": 1}) == 0, "nothing is known yet"
    nothing = replace(HERE, share=0.0)
    assert load(device(a=nothing, b=AWAY), demands, {"a": 1}) == pytest.approx(20 / (100 * FLOOR / 2))


def test_a_device_that_is_too_full_is_relieved_by_a_second_copy() -> None:
    full = device("w1", a=HERE, b=HERE)
    idle = device("w2", num_places=1, a=AWAY, b=AWAY, c=HERE)
    demands = {"a": Demand(tokens_per_second=60.0), "b": Demand(tokens_per_second=50.0)}
    assert decide([full, idle], demands, 0.0).loads == {"w1": pytest.approx(1.1), "w2": 0.0}
    assert prefetches([full, idle], **demands) == [("w2", "a")]
    assert prefetches([full, idle], a=Demand(tokens_per_second=40.0), b=Demand(tokens_per_second=50.0)) == [], "it is efficient"
    assert prefetches([full, idle], c=Demand(tokens_per_second=5.0), **demands) == [], "what it would push aside is wanted"
    asked = replace(AWAY, asked_at=0.0)
    assert prefetches([full, device("w2", num_places=1, a=asked, b=AWAY)], now=5.0, **demands) == [("w2", "b")]


def test_no_second_copy_where_it_would_be_too_full_as_well() -> None:
    full = device("w1", a=HERE)
    other = device("w2", a=AWAY, b=HERE)
    demands = {"a": Demand(tokens_per_second=120.0), "b": Demand(tokens_per_second=45.0)}
    assert prefetches([full, other], **demands) == []
    assert prefetches([full, other], a=Demand(tokens_per_second=120.0), b=Demand(tokens_per_second=30.0)) == [("w2", "a")]


_ENTRIES = st.builds(
    Entry,
    is_on_device=st.booleans(),
    num_bytes=st.integers(1, 4),
    load_seconds=st.floats(0, 5),
    tokens_per_second=st.sampled_from([0.0, 1.0, 100.0]),
    share=st.floats(0, 1),
    num_requests=st.integers(0, 2),
    stay_seconds=st.sampled_from([0.0, 0.5]),
    pinned=st.booleans(),
    failed=st.booleans(),
    movable=st.booleans(),
    asked_at=st.floats(-100, 0),
)
_DEMANDS = st.builds(Demand, st.floats(0, 200), st.integers(0, 3), st.floats(0, 9))
_MODELS = st.sampled_from("abcd")


@given(
    fleet=st.lists(st.tuples(st.integers(0, 8), st.dictionaries(_MODELS, _ENTRIES)), max_size=4), demands=st.dictionaries(_MODELS, _DEMANDS)
)
def test_whatever_the_fleet_is_like(fleet: list[tuple[int, dict[str, Entry]]], demands: dict[str, Demand]) -> None:
    """Nothing comes twice, where it is, where what stays leaves no room, or just after it was asked for. Order is of no account."""
    devices = [Device(f"w{index}", size, entries) for index, (size, entries) in enumerate(fleet)]
    placements = decide(devices, demands, 0.0)
    assert placements == decide(list(reversed(devices)), demands, 0.0)
    assert len({p.worker_id for p in placements.prefetches}) == len(placements.prefetches)
    assert len({p.model for p in placements.prefetches}) == len(placements.prefetches)
    by_name = {d.worker_id: d for d in devices}
    for prefetch in placements.prefetches:
        assert isinstance(prefetch, Prefetch)
        where = by_name[prefetch.worker_id]
        entry = where.entries[prefetch.model]
        assert could_come(prefetch.model, where, 0.0)
        stays = sum(e.num_bytes for e in where.entries.values() if e.is_on_device and (e.pinned or e.num_requests or e.stay_seconds > 0))
        assert stays + entry.num_bytes <= where.weights_bytes
        assert entry.asked_at <= -LEAST_HOLD_SECONDS
        assert demands[prefetch.model].num_waiting or demands[prefetch.model].tokens_per_second
    assert all(value >= 0 for value in placements.loads.values())
