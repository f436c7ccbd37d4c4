"""How fast a queue drains, and what those who wait or were refused are told of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.pace import Pace, retry_seconds


def test_expected_wait_follows_the_pace() -> None:
    pace = Pace(now=0.0)
    assert pace.eta_seconds(0, now=0.0) == -1
    assert pace.per_second(now=0.0) == 0
    for tenth in range(600):
        pace.placed(tenth / 10)
    assert pace.per_second(now=60.0) == pytest.approx(10, rel=0.3)
    assert pace.eta_seconds(9, now=60.0) == pytest.approx(1.0, rel=0.3)
    assert pace.eta_seconds(99, now=60.0) == pytest.approx(10.0, rel=0.3)
    assert pace.eta_seconds(0, now=600.0) == -1, "an old pace says nothing"


def test_a_first_burst_is_not_taken_for_the_pace_of_half_a_minute() -> None:
    pace = Pace(now=100.0)
    for _ in range(20):
        pace.placed(100.5)
    assert pace.per_second(now=101.0) == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize(("num_waiting", "per_second", "seconds"), [(100, 10.0, 10.0), (1, 100.0, 1.0), (4096, 1.0, 30.0), (7, 0.0, 5.0)])
def test_who_was_refused_comes_back_when_the_queue_has_drained(num_waiting: int, per_second: float, seconds: float) -> None:
    assert retry_seconds(num_waiting, per_second, 0.5) == seconds


@given(st.floats(0, 1), st.integers(0, 10_000), st.floats(0, 1000))
def test_those_who_were_refused_together_do_not_come_back_together(spread: float, num_waiting: int, per_second: float) -> None:
    middle = retry_seconds(num_waiting, per_second, 0.5)
    assert 0.74 * middle <= retry_seconds(num_waiting, per_second, spread) <= 1.26 * middle
