"""A pause of one's own is nobody else's silence."""

from services.scheduler.uptime import Uptime


def test_time_counts_from_the_start_while_there_is_no_gap() -> None:
    uptime = Uptime(100.0, 3.0)
    assert [uptime.since(now) for now in (101.0, 103.9, 106.9)] == [100.0] * 3


def test_after_a_gap_it_counts_anew() -> None:
    uptime = Uptime(100.0, 3.0)
    assert uptime.since(200.0) == 200.0
    assert uptime.since(202.0) == 200.0
