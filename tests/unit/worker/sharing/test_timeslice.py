"""Whose step is next: shares by class, and nobody who starves or saves up."""

from collections import Counter

import pytest

from services.worker.sharing.timeslice import TimeSlice

REALTIME, STANDARD, BATCH = 1, 2, 3


def run(turns: TimeSlice, wanting: dict[str, int], num_steps: int, seconds: dict[str, float] | None = None) -> list[str]:
    chosen = []
    for _ in range(num_steps):
        model = turns.choose(wanting)
        turns.charge(model, (seconds or {}).get(model, 1.0))
        chosen.append(model)
    return chosen


def test_equals_take_turns() -> None:
    assert sorted(run(TimeSlice(), {"a": STANDARD, "b": STANDARD, "c": STANDARD}, 3)) == ["a", "b", "c"]
    assert Counter(run(TimeSlice(), {"a": STANDARD, "b": STANDARD, "c": STANDARD}, 300)) == {"a": 100, "b": 100, "c": 100}


def test_time_counts_and_not_steps() -> None:
    counts = Counter(run(TimeSlice(), {"slow": STANDARD, "fast": STANDARD}, 110, {"slow": 10.0, "fast": 1.0}))
    assert counts["slow"] == pytest.approx(10, abs=1)


def test_classes_share_by_weight_and_batch_never_starves() -> None:
    counts = Counter(run(TimeSlice(), {"chat": REALTIME, "other": STANDARD, "bulk": BATCH}, 1111))
    assert counts["chat"] == pytest.approx(1001, abs=2)
    assert counts["other"] == pytest.approx(100, abs=2)
    assert counts["bulk"] == pytest.approx(10, abs=2)


def test_of_equal_accounts_the_more_urgent_is_first() -> None:
    assert TimeSlice().choose({"bulk": BATCH, "chat": REALTIME}) == "chat"


def test_a_rest_is_not_saved_up() -> None:
    turns = TimeSlice()
    run(turns, {"a": STANDARD, "b": STANDARD}, 10)
    run(turns, {"a": STANDARD}, 100)
    assert Counter(run(turns, {"a": STANDARD, "b": STANDARD}, 20))["b"] == pytest.approx(10, abs=1)


def test_who_has_worked_much_does_not_wait_for_a_newcomer_to_catch_up() -> None:
    """Nor does it owe ten of its standard seconds for the last one of batch."""
    turns = TimeSlice()
    run(turns, {"old": BATCH}, 1000)
    assert Counter(run(turns, {"old": STANDARD, "new": STANDARD}, 20))["old"] >= 9
