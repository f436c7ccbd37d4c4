"""What a worker has still to compute: what it told, what was sent since, less what it computes meanwhile; each request counted once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy import backlog as module
from services.scheduler.policy.backlog import LISTED_SECONDS, Backlog


def test_what_was_just_sent_counts_before_any_heartbeat() -> None:
    backlog = Backlog()
    backlog.sent("i1", "a", 100, 5.0)
    backlog.sent("i1", "b", 50, 5.0)
    assert (backlog.tokens("i1", 5.0), backlog.tokens("i2", 5.0)) == (150, 0)


def test_it_drains_at_the_rate_that_was_told() -> None:
    backlog = Backlog()
    backlog.told("i1", 1000, 400.0, (), 10.0)
    assert backlog.tokens("i1", 11.0) == 600
    backlog.sent("i1", "a", 300, 12.0)
    assert backlog.tokens("i1", 12.0) == 500
    assert backlog.tokens("i1", 20.0) == 0


def test_a_heartbeat_counts_what_it_lists_and_what_is_on_its_way_is_added() -> None:
    backlog = Backlog()
    backlog.sent("i1", "listed", 100, 1.0)
    backlog.sent("i1", "on its way", 30, 1.1)
    backlog.told("i1", 90, 0.0, {"listed"}, 1.2)
    assert backlog.tokens("i1", 1.2) == 120
    backlog.told("i1", 5, 0.0, {"listed"}, 1.2 + LISTED_SECONDS)
    assert backlog.tokens("i1", 9.0) == 5, "it has ended between two heartbeats, or never came"


def test_what_has_ended_counts_no_more_though_no_heartbeat_came_between() -> None:
    backlog = Backlog()
    backlog.sent("i1", "short", 224, 1.0)
    backlog.sent("i1", "other", 30, 1.0)
    backlog.ended("short")
    backlog.ended("short")
    backlog.ended("of another scheduler")
    assert backlog.tokens("i1", 1.1) == 30
    backlog.told("i1", 0, 0.0, (), 1.2)
    assert backlog.tokens("i1", 1.2) == 30


def test_incarnations_are_bounded_the_longest_silent_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 2)
    backlog = Backlog()
    for incarnation in ("i1", "i2", "i1", "i3"):
        backlog.sent(incarnation, "r", 1, 0.0)
    assert [backlog.tokens(i, 0.0) > 0 for i in ("i1", "i2", "i3")] == [True, False, True]


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 500), st.booleans()), max_size=30), st.floats(0, 1000))
def test_it_is_never_negative_and_never_more_than_all_that_came(events: list[tuple[float, int, bool]], rate: float) -> None:
    backlog, now, total = Backlog(), 0.0, 0
    for number, (pause, tokens, is_heartbeat) in enumerate(events):
        now += pause
        total += tokens
        if is_heartbeat:
            backlog.told("i1", tokens, rate, (), now)
        else:
            backlog.sent("i1", f"r{number}", tokens, now)
        assert 0 <= backlog.tokens("i1", now) <= total
