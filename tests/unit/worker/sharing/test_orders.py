"""Operators' and schedulers' wishes: what is done, what is refused and why, and that the same wish twice is no error."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.worker.sharing.orders import Kind, obey
from services.worker.sharing.residency import ALIGNMENT, LOAD_SECONDS, MIN_STAY_SECONDS, PREFETCH_SECONDS, Move, Place, Residency

PAGE = ALIGNMENT
STANDARD = 2


def residency_of(budget: int, **pages: int) -> Residency:
    residency = Residency(budget * PAGE)
    for model, num in pages.items():
        residency.add(model, num * PAGE)
    return residency


def come(residency: Residency, work: dict[str, int], now: float, seconds: float = 0.1) -> Move | None:
    move = residency.next(work, now)
    if move is not None:
        residency.arrived(move.model, seconds)
        residency.check_integrity()
    return move


def do(residency: Residency, kind: Kind, model: str, now: float = 0.0, num_requests: int = 0) -> str:
    outcome = obey(residency, kind, model, num_requests, now)
    assert not outcome.refused
    return outcome.words


def refusal(residency: Residency | None, kind: Kind, model: str, num_requests: int = 0) -> str:
    outcome = obey(residency, kind, model, num_requests, 0.0)
    assert outcome.refused
    assert not outcome.drop
    return outcome.words


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.PREFETCH])
def test_a_model_comes_without_work_and_twice_is_once(kind: Kind) -> None:
    residency = residency_of(2, a=1, b=1)
    assert not residency.is_moving
    for _ in range(2):
        assert do(residency, kind, "b") == "is coming to the device"
    assert residency.is_moving
    assert come(residency, {}, 0.1) == Move("b", 0, ())
    assert not residency.is_moving
    assert do(residency, kind, "b", 0.2) == "is on the device already"
    assert come(residency, {}, 0.3) is None


def test_a_load_pushes_work_aside_when_it_has_had_its_turn_and_a_prefetch_does_not() -> None:
    residency = residency_of(1, a=1, b=1)
    come(residency, {"a": STANDARD}, 0.0)
    do(residency, Kind.PREFETCH, "b", 1.0)
    assert come(residency, {"a": STANDARD}, MIN_STAY_SECONDS + 1) is None
    do(residency, Kind.LOAD, "b", 3.0)
    assert come(residency, {"a": STANDARD}, 3.0) == Move("b", 0, ("a",))


def test_a_prefetch_takes_the_place_of_the_idle_after_their_least_stay() -> None:
    residency = residency_of(1, a=1, b=1)
    come(residency, {"a": STANDARD}, 0.0)
    do(residency, Kind.PREFETCH, "b", 0.5)
    assert come(residency, {}, MIN_STAY_SECONDS - 0.01) is None
    assert come(residency, {}, MIN_STAY_SECONDS) == Move("b", 0, ("a",))


@pytest.mark.parametrize(("kind", "seconds"), [(Kind.PREFETCH, PREFETCH_SECONDS), (Kind.LOAD, LOAD_SECONDS)])
def test_a_wish_that_finds_no_room_is_given_up(kind: Kind, seconds: float) -> None:
    residency = residency_of(1, a=1, b=1)
    come(residency, {"a": 1}, 0.0)
    residency.residents["a"].came_at = 1000.0  # it may not go
    do(residency, kind, "b", 0.0)
    assert come(residency, {"a": 1}, seconds) is None
    assert residency.is_moving
    come(residency, {"a": 1}, seconds + 0.1)
    assert not residency.is_moving


def test_requests_that_wait_come_before_a_prefetch() -> None:
    residency = residency_of(1, a=1, b=1)
    do(residency, Kind.PREFETCH, "a")
    assert come(residency, {"b": 3}, 0.1) == Move("b", 0, ())


def test_an_unload_gives_the_place_up_unless_it_is_needed() -> None:
    residency = residency_of(2, a=1, b=1)
    come(residency, {"a": STANDARD}, 0.0)
    assert refusal(residency, Kind.UNLOAD, "a", num_requests=2) == "is in use by 2 requests: try again when they have ended"
    assert obey(residency, Kind.UNLOAD, "a", 0, 1.0).drop
    assert residency.residents["a"].place is Place.HOST
    again = obey(residency, Kind.UNLOAD, "a", 0, 1.0)
    assert (again.drop, again.refused, again.words) == (False, False, "is in host memory already")
    residency.pin(["a"])
    assert refusal(residency, Kind.UNLOAD, "a") == "is pinned by an operator: unpin it first"
    residency.pin([])
    residency.next({"a": STANDARD}, 2.0)
    assert refusal(residency, Kind.UNLOAD, "a") == "is just coming: try again when it is there"


def test_an_unload_ends_a_load_that_has_not_begun() -> None:
    residency = residency_of(1, a=1)
    do(residency, Kind.LOAD, "a")
    do(residency, Kind.UNLOAD, "a")
    assert come(residency, {}, 0.1) is None


def test_a_pin_comes_by_itself_stays_and_goes_again_when_it_is_taken_back() -> None:
    residency = residency_of(2, a=1, b=1, c=1)
    assert do(residency, Kind.PIN, "a") == "stays on the device"
    assert not residency.residents["a"].pinned, "an act says only whether it could be"
    residency.pin(["a", "nobody"])
    assert residency.is_moving
    assert come(residency, {}, 0.0) == Move("a", 0, ())
    come(residency, {"b": STANDARD}, 0.1)
    assert come(residency, {"c": STANDARD}, 50.0) == Move("c", PAGE, ("b",))
    residency.pin([])
    assert come(residency, {"b": STANDARD, "c": STANDARD}, 99.0) == Move("b", 0, ("a",))


def test_a_pin_must_leave_room_for_the_largest_other() -> None:
    residency = residency_of(4, a=2, b=1, large=3)
    assert "must hold the largest other model, 12288 bytes" in refusal(residency, Kind.PIN, "a")
    residency.pin(["a", "b"])
    assert [r.model for r in residency.residents.values() if r.pinned] == ["b"]
    assert do(residency, Kind.PIN, "b") == "stays on the device"
    assert do(residency, Kind.UNPIN, "a") == "gives way like others"


def test_the_worker_s_own_pins_are_not_an_operator_s_to_take_back() -> None:
    residency = Residency(2 * PAGE)
    residency.add("a", PAGE, pinned=True)
    residency.add("b", PAGE)
    assert "FOREBAY_PINNED_MODELS" in refusal(residency, Kind.UNPIN, "a")
    assert "FOREBAY_PINNED_MODELS" in refusal(residency, Kind.UNLOAD, "a")
    residency.pin([])
    assert residency.residents["a"].pinned


def test_a_pinned_model_in_the_middle_makes_place_for_one_that_needs_the_whole_rest() -> None:
    residency = residency_of(4, a=1, b=1, large=3)
    come(residency, {"a": STANDARD}, 0.0)
    come(residency, {"b": STANDARD}, 0.1)
    residency.pin(["b"])
    assert come(residency, {"large": STANDARD}, 50.0) == Move("large", 0, ("a", "b"))
    assert come(residency, {"large": STANDARD}, 50.1) == Move("b", 3 * PAGE, ())


def test_a_model_that_can_t_be_served_says_so() -> None:
    residency = residency_of(1, large=2)
    for kind in (Kind.LOAD, Kind.PREFETCH, Kind.PIN, Kind.UNLOAD):
        assert "can't be served here: its weights take" in refusal(residency, kind, "large")


def test_weights_that_never_move_are_there_already() -> None:
    for kind in (Kind.LOAD, Kind.PREFETCH, Kind.PIN, Kind.UNPIN):
        assert obey(None, kind, "a", 0, 0.0).words == "never leaves the device"
    assert "FOREBAY_DEVICE_MEMORY" in refusal(None, Kind.UNLOAD, "a")


def test_seconds_to_load_follow_the_bytes_and_the_rate_that_was_measured() -> None:
    residency = residency_of(9, a=1, b=4)
    assert residency.seconds_to_load("b") is None
    come(residency, {"a": STANDARD}, 0.0, seconds=0.5)
    assert residency.seconds_to_load("b") == pytest.approx(2.0)
    come(residency, {"b": STANDARD}, 0.0, seconds=1.0)
    assert residency.seconds_to_load("a") == pytest.approx(1 / 3)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_is_wished_work_is_served_and_pins_that_fit_stay(seed: int) -> None:
    """Sizes that leave gaps. After any wishes, whoever has work comes within some turns, and pins don't go to and fro."""
    rng = random.Random(seed)
    sizes = {model: rng.randint(1, 4) for model in "abcdef"[: rng.randint(3, 6)]}
    residency = residency_of(rng.randint(4, 10), **sizes)
    pins: set[str] = set()
    now = 0.0
    for _ in range(rng.randint(0, 25)):
        now += 5.0
        wish, model = rng.choice(["LOAD", "PREFETCH", "UNLOAD", "pin", "unpin", "work"]), rng.choice(list(sizes))
        if wish in ("pin", "unpin"):
            pins = pins | {model} if wish == "pin" else pins - {model}
            residency.pin(pins)
        elif wish == "work":
            come(residency, {model: STANDARD}, now)
        else:
            obey(residency, Kind[wish], model, 0, now)
        come(residency, {}, now)
    for model in sizes:
        for _ in range(12):
            now += 5.0
            come(residency, {model: STANDARD}, now)
        assert residency.residents[model].place is Place.DEVICE
        assert all(r.place is Place.DEVICE for r in residency.residents.values() if r.pinned)
