"""Who goes next: class, then arrival, whatever orgs they belong to; and what a waiting request is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.order import Pace, Ticket, arrange, positions


def _ticket(request_id: str, latency_class: int, org: str, order: int) -> Ticket:
    return Ticket(request_id, org, latency_class, "tiny@fp32", "v1", 10, 10, order=order)


@st.composite
def _waiting(draw: st.DrawFn) -> list[Ticket]:
    entries = draw(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from("abc")), max_size=30))
    return [_ticket(f"r{order}", latency_class, org, order) for order, (latency_class, org) in enumerate(entries)]


def _fifos(tickets: list[Ticket]) -> list[list[Ticket]]:
    fifos: dict[tuple[int, str], list[Ticket]] = {}
    for ticket in tickets:
        fifos.setdefault((ticket.latency_class, ticket.org), []).append(ticket)
    return list(fifos.values())


@given(_waiting())
def test_merging_the_fifos_equals_sorting_all_tickets(tickets: list[Ticket]) -> None:
    expected = sorted(tickets, key=lambda ticket: (ticket.latency_class, ticket.order))
    assert list(arrange(_fifos(tickets))) == expected


@given(_waiting())
def test_position_counts_the_tickets_of_the_same_line_ahead(tickets: list[Ticket]) -> None:
    for latency_class in (1, 2, 3):
        line = [ticket for ticket in tickets if ticket.latency_class == latency_class]
        fifos: dict[str, list[tuple[str, int]]] = {}
        for ticket in line:
            fifos.setdefault(ticket.org, []).append((ticket.request_id, ticket.order))
        assert positions(fifos) == {ticket.request_id: ahead for ahead, ticket in enumerate(line)}


def test_a_ticket_that_comes_back_keeps_its_old_place() -> None:
    first, second, back = _ticket("first", 2, "a", 1), _ticket("second", 2, "a", 3), _ticket("back", 2, "b", 2)
    assert [ticket.request_id for ticket in arrange([[first, second], [back]])] == ["first", "back", "second"]


def test_expected_wait_follows_the_pace() -> None:
    pace = Pace(now=0.0)
    assert pace.eta_seconds(0, now=0.0) == -1
    for tenth in range(600):
        pace.placed(tenth / 10)
    assert pace.eta_seconds(9, now=60.0) == pytest.approx(1.0, rel=0.3)
    assert pace.eta_seconds(99, now=60.0) == pytest.approx(10.0, rel=0.3)
    assert pace.eta_seconds(0, now=600.0) == -1, "an old pace says nothing"


def test_a_young_pace_isnt_taken_for_a_slow_one() -> None:
    pace = Pace(now=0.0)
    for _ in range(20):
        pace.placed(2.0)
    assert pace.eta_seconds(9, now=2.0) == pytest.approx(1.0, rel=0.1)
