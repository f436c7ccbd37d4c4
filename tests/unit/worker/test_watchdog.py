"""When a step loop counts as stalled: by the longest step, and not by time in which the process was stopped."""

import pytest

from services.worker.watchdog import FIRST_STALL_SECONDS, LONG_STEPS, STALL_SECONDS, Limit, Pauses


def test_before_the_first_step_has_ended_nobody_knows_how_long_steps_are() -> None:
    assert Limit.of(0.0).seconds == FIRST_STALL_SECONDS > STALL_SECONDS


def test_short_steps_leave_the_least_limit() -> None:
    assert Limit.of(0.05).seconds == STALL_SECONDS


def test_long_steps_raise_the_limit_and_what_follows_from_it() -> None:
    assert Limit.of(10.0).seconds == LONG_STEPS * 10
    assert Limit.of(10.0).lost_seconds == pytest.approx(75)
    assert Limit.of(0.05).lost_seconds == pytest.approx(15)


def test_looks_in_time_find_no_pause() -> None:
    pauses = Pauses(100.0)
    assert [pauses.look(100.0 + 0.25 * number) for number in range(1, 20)] == [0.0] * 19


def test_a_late_look_finds_the_pause_once() -> None:
    pauses = Pauses(100.0)
    assert pauses.look(120.0) == 20.0
    assert pauses.look(120.25) == 0.0
