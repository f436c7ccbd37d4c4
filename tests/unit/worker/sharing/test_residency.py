"""Who is on the device, by a clock of numbers: turns come, stays are kept, extents lie apart, a failure is its own model's."""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.worker.sharing.residency import ALIGNMENT, MIN_STAY_SECONDS, STAY_PER_LOAD, Move, Place, Residency

PAGE = ALIGNMENT
REALTIME, STANDARD, BATCH = 1, 2, 3


def two_of_three(**pinned: bool) -> Residency:
    residency = Residency(2 * PAGE)
    for model in "abc":
        residency.add(model, PAGE, pinned=pinned.get(model, False))
    return residency


def bring(residency: Residency, work: dict[str, int], now: float, seconds: float = 0.0) -> Move:
    move = residency.next(work, now)
    assert move is not None
    residency.arrived(move.model, seconds)
    residency.check_integrity()
    return move


def test_who_waits_comes_while_there_is_room_one_at_a_time() -> None:
    residency = two_of_three()
    assert residency.next({}, 0.0) is None
    assert residency.next({"a": STANDARD, "b": STANDARD}, 0.0) == Move("a", 0, ())
    assert residency.next({"a": STANDARD, "b": STANDARD}, 0.1) is None
    residency.arrived("a", 0.1)
    assert residency.next({"a": STANDARD, "b": STANDARD}, 0.1) == Move("b", PAGE, ())
    assert residency.residents["b"].place is Place.ARRIVING


def test_the_least_recently_used_of_the_idle_gives_way() -> None:
    residency = two_of_three()
    bring(residency, {"a": STANDARD}, 0.0)
    bring(residency, {"b": STANDARD}, 1.0)
    residency.next({"a": STANDARD}, 5.0)
    assert bring(residency, {"c": STANDARD}, 9.0) == Move("c", PAGE, ("b",))
    assert residency.residents["b"].place is Place.HOST
    assert residency.residents["b"].num_evictions == 1


def test_the_idle_give_way_before_the_busy_and_of_those_the_first_come() -> None:
    residency = two_of_three()
    bring(residency, {"a": STANDARD}, 0.0)
    bring(residency, {"b": STANDARD}, 1.0)
    assert bring(residency, {"a": STANDARD, "c": STANDARD}, 9.0).evicted == ("b",)
    assert bring(residency, {"a": STANDARD, "b": STANDARD, "c": STANDARD}, 19.0).evicted == ("a",)


@pytest.mark.parametrize(("seconds", "stay"), [(0.0, MIN_STAY_SECONDS), (0.5, STAY_PER_LOAD * 0.5)])
def test_nobody_gives_way_before_having_stayed(seconds: float, stay: float) -> None:
    residency = Residency(PAGE)
    for model in "ab":
        residency.add(model, PAGE)
    bring(residency, {"a": STANDARD}, 0.0, seconds)
    assert residency.next({"a": STANDARD, "b": STANDARD}, stay - 0.01) is None
    assert residency.next({"b": STANDARD}, MIN_STAY_SECONDS - 0.01) is None
    assert residency.next({"a": STANDARD, "b": STANDARD}, stay) == Move("b", 0, ("a",))


def test_a_pinned_model_comes_by_itself_and_never_goes() -> None:
    residency = two_of_three(a=True)
    assert bring(residency, {}, 0.0).model == "a"
    work = {"b": STANDARD, "c": STANDARD}
    moved = [bring(residency, work, now) for now in (1.0, 10.0, 20.0)]
    assert [move.evicted for move in moved] == [(), ("b",), ("c",)]
    assert residency.residents["a"].place is Place.DEVICE


def test_more_urgent_work_keeps_its_place_until_the_other_has_waited_long() -> None:
    residency = Residency(PAGE)
    for model in "ab":
        residency.add(model, PAGE)
    bring(residency, {"a": REALTIME}, 0.0)
    work = {"a": REALTIME, "b": BATCH}
    waited = next(now for now in range(1, 100) if residency.next(work, float(now)) is not None)
    assert 25 < waited < 40
    residency.arrived("b", 0.0)
    assert residency.next(work, waited + MIN_STAY_SECONDS) == Move("a", 0, ("b",))


def test_no_more_give_way_than_must() -> None:
    """The first by age are small; where the hole in the end needs only a later one, they stay."""
    residency = Residency(4 * PAGE)
    for model, pages in {"a": 1, "b": 3, "c": 3}.items():
        residency.add(model, pages * PAGE)
    bring(residency, {"a": STANDARD}, 0.0)
    bring(residency, {"b": STANDARD}, 1.0)
    assert bring(residency, {"c": STANDARD}, 9.0) == Move("c", PAGE, ("b",))


def test_what_the_budget_can_never_hold_has_a_reason_and_waits_for_nothing() -> None:
    residency = two_of_three(a=True)
    large = residency.add("large", PAGE + 1)
    assert large.place is Place.COLD
    assert large.failure == (
        f"its weights take {2 * PAGE} bytes; the device has {2 * PAGE} for weights, of which pinned models hold {PAGE}: raise the device "
        "memory, or serve it at fewer bits"
    )
    assert bring(residency, {"large": REALTIME}, 0.0).model == "a"
    assert residency.next({"large": REALTIME}, 99.0) is None
    residency.fail("b", "the file is damaged")
    assert residency.next({"b": REALTIME}, 99.0) is None
    assert bring(residency, {"b": REALTIME, "c": STANDARD}, 99.0).model == "c"


@dataclass
class Course:
    """What happened to models that share a device for some minutes."""

    residency: Residency
    num_seconds: float
    waits: dict[str, float] = field(default_factory=dict)  # the longest

    def run(self, work_at: "dict[str, list[tuple[float, float]]]", load_seconds: float) -> None:
        """`work_at`: when each model has work."""
        arrives: float | None = None
        coming, now = "", 0.0
        while now < self.num_seconds:
            if arrives is not None and now >= arrives:
                self.residency.arrived(coming, load_seconds)
                arrives = None
            work = {model: STANDARD for model, spans in work_at.items() if any(start <= now < end for start, end in spans)}
            if (move := self.residency.next(work, now)) is not None:
                coming, arrives = move.model, now + load_seconds
            self.residency.check_integrity()
            for resident in self.residency.residents.values():
                if resident.waiting_since is not None:
                    self.waits[resident.model] = max(self.waits.get(resident.model, 0.0), now - resident.waiting_since)
            now += 0.05


@settings(max_examples=40, deadline=None)
@given(
    num_models=st.integers(2, 7),
    num_places=st.integers(1, 3),
    load_seconds=st.sampled_from([0.05, 0.2, 0.7]),
    busy=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_two_hot_models_dont_thrash_and_nobody_waits_over_five_turns(
    num_models: int, num_places: int, load_seconds: float, busy: bool, seed: int
) -> None:
    """Loads are bounded by duration over stay, each wait by five fair rounds: whether all have work for ever or come and go."""
    rng = random.Random(seed)
    residency = Residency(num_places * PAGE)
    models = [f"m{index}" for index in range(num_models)]
    for model in models:
        residency.add(model, PAGE)
    course = Course(residency, 60.0)
    spans = {m: [(0.0, 60.0)] if busy else [(t := rng.uniform(0, 50), t + rng.uniform(0.1, 9)) for _ in range(4)] for m in models}
    course.run(spans, load_seconds)
    stay = max(MIN_STAY_SECONDS, STAY_PER_LOAD * load_seconds) if busy else MIN_STAY_SECONDS
    for resident in residency.residents.values():
        assert resident.num_loads <= 60.0 / stay + 1
    fair = (max(MIN_STAY_SECONDS, STAY_PER_LOAD * load_seconds) + load_seconds + 0.1) * max(1.0, num_models / num_places)
    assert max(course.waits.values(), default=0.0) <= 5 * fair
