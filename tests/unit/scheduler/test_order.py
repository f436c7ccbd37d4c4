"""Who goes next: class by weight, age and floor share; then the org that was given least; then arrival. What those who wait are told."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policy.classes import BATCH, REALTIME, STANDARD
from services.policy.org import OrgPolicy
from services.scheduler.policy.order import Fifo, Order, Ticket, expected_output, positions
from services.scheduler.policy.rules import Rules

MODEL = "tiny@fp32"
RULES = Rules()


def _ticket(
    request_id: str, latency_class: int = 2, org: str = "a", order: int = 0, *, tokens: int = 10, waited: float = 0.0, model: str = MODEL
) -> Ticket:
    return Ticket(request_id, org, latency_class, model, "v1", tokens, 0, order=order, waited_seconds=waited)


def _fifos(tickets: Iterable[Ticket], served: dict[str, float] | None = None) -> list[Fifo]:
    queues: dict[tuple[str, int, str], list[Ticket]] = {}
    for ticket in tickets:
        queues.setdefault((ticket.model, ticket.latency_class, ticket.org), []).append(ticket)
    return [Fifo(queue, (served or {}).get(org, 0.0)) for (_, _, org), queue in queues.items()]


def _in_order(order: Order) -> list[str]:
    """Request ids, as if each were placed in its turn."""
    names = []
    for turn in order:
        names.append(turn.ticket.request_id)
        order.placed()
    return names


@st.composite
def _waiting(draw: st.DrawFn) -> list[Ticket]:
    entries = draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from("abc"), st.integers(1, 99), st.floats(0, 100)), max_size=30)
    )
    return [_ticket(f"r{i}", c, org, i, tokens=tokens, waited=waited) for i, (c, org, tokens, waited) in enumerate(entries)]


@given(_waiting(), st.randoms(use_true_random=False), st.booleans())
def test_the_order_is_total_and_depends_on_nothing_but_what_waits(tickets: list[Ticket], rng: random.Random, fifo: bool) -> None:
    fifos = _fifos(tickets)
    rules = Rules(fifo=fifo)
    first = _in_order(Order(fifos, rules))
    assert sorted(first) == sorted(ticket.request_id for ticket in tickets)
    rng.shuffle(fifos)
    assert _in_order(Order(fifos, rules)) == first


@given(_waiting())
def test_an_orgs_tickets_of_one_class_go_in_order_of_arrival(tickets: list[Ticket]) -> None:
    seen: dict[tuple[int, str], list[int]] = defaultdict(list)
    for turn in Order(_fifos(tickets), RULES):
        seen[turn.ticket.latency_class, turn.ticket.org].append(turn.ticket.order)
    assert all(orders == sorted(orders) for orders in seen.values())


def test_fresh_tickets_go_by_class_while_no_class_lacks_its_floor_share() -> None:
    tickets = [_ticket("b", BATCH, order=1), _ticket("s", STANDARD, order=2), _ticket("r", REALTIME, order=3)]
    assert [turn.ticket.request_id for turn in Order(_fifos(tickets), RULES)] == ["r", "s", "b"]


@pytest.mark.parametrize(
    ("latency_class", "waited", "first"),
    [(BATCH, 53.0, "fresh"), (BATCH, 53.3, "old"), (STANDARD, 53.0, "fresh"), (STANDARD, 53.3, "old")],
)
def test_age_doubles_a_tickets_weight(latency_class: int, waited: float, first: str) -> None:
    """log2(100) time constants of batch, log2(10) of standard."""
    tickets = [_ticket("old", latency_class, order=1, waited=waited), _ticket("fresh", REALTIME, order=2)]
    assert _in_order(Order(_fifos(tickets), RULES))[0] == first


def test_an_old_ticket_outweighs_nobody_before_its_own_turn() -> None:
    """The flood of an org that was given much is no reason to prefer its whole class."""
    tickets = [_ticket("flood", BATCH, "flood", 1, waited=500), _ticket("small", BATCH, "small", 2), _ticket("now", REALTIME, order=3)]
    assert [turn.ticket.request_id for turn in Order(_fifos(tickets, {"flood": 1000.0}), RULES)] == ["now", "small", "flood"]


def test_a_class_below_its_floor_share_is_first_of_all() -> None:
    tickets = [_ticket("b", BATCH, order=1), _ticket("s", STANDARD, order=2), _ticket("r", REALTIME, order=3)]
    order = Order(_fifos(tickets), RULES, {MODEL: [0, 900, 0, 40]})
    assert [(turn.ticket.request_id, turn.first_of_all) for turn in order] == [("s", True), ("b", True), ("r", False)]
    order = Order(_fifos(tickets), RULES, {MODEL: [0, 700, 250, 50]})
    assert [(turn.ticket.request_id, turn.first_of_all) for turn in order] == [("r", False), ("s", False), ("b", False)]


def test_floors_are_of_each_model_alone() -> None:
    tickets = [_ticket("b", BATCH, order=1), _ticket("r", REALTIME, order=3)]
    assert [turn.ticket.request_id for turn in Order(_fifos(tickets), RULES, {"other": [0, 900, 0, 0]})] == ["r", "b"]


@given(st.floats(0.01, 0.24), st.floats(0.01, 0.24), st.integers(0, 2**32))
def test_every_class_with_work_gets_its_floor_share(standard: float, batch: float, seed: int) -> None:
    """In one long round, where nothing fades: to within a few of the largest ticket."""
    rng = random.Random(seed)
    classes = {**RULES.classes, STANDARD: replace(RULES.classes[STANDARD], floor_share=standard)}
    rules = Rules(classes={**classes, BATCH: replace(RULES.classes[BATCH], floor_share=batch)})
    tickets = [_ticket(f"r{i}", 1 + i % 3, order=i, tokens=rng.randint(1, 50)) for i in range(300)]
    given_tokens, left = Counter[int](), Counter(ticket.latency_class for ticket in tickets)
    order = Order(_fifos(tickets), rules, {MODEL: [0.0, 1.0, 0.0, 0.0]})
    for turn in order:
        order.placed()
        given_tokens[turn.ticket.latency_class] += turn.ticket.num_prompt_tokens
        left[turn.ticket.latency_class] -= 1
        if min(left.values()) == 0:
            break
        for latency_class, floor in ((STANDARD, standard), (BATCH, batch)):
            assert given_tokens[latency_class] >= floor * given_tokens.total() - 100


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=2, max_size=4))
def test_two_backlogged_orgs_are_never_further_apart_than_twice_the_largest_request(seed: int, weights: list[float]) -> None:
    """100 random schedules in each of 100 examples: rounds of any size, after which the counters come from elsewhere again."""
    rng = random.Random(seed)
    orgs = dict(zip("abcd", weights, strict=False))
    rules = Rules(org=lambda org: OrgPolicy(weight=orgs[org]))
    for _ in range(100):
        largest = rng.choice([1, 50, 2000])
        served = dict.fromkeys(orgs, 0.0)
        waiting = {org: [_ticket(f"{org}{i}", org=org, order=i, tokens=rng.randint(1, largest)) for i in range(12)] for org in orgs}
        most = max(ticket.num_prompt_tokens / orgs[org] for org in orgs for ticket in waiting[org])
        while all(waiting.values()):
            order = Order([Fifo(queue[:3], served[org], len(queue) > 3) for org, queue in waiting.items()], rules)
            room = rng.randint(1, 8)
            for turn in order:
                order.placed()
                org = turn.ticket.org
                assert waiting[org].pop(0) == turn.ticket
                served[org] += turn.ticket.num_prompt_tokens / orgs[org]
                room -= 1
                if not room or not all(waiting.values()):
                    break
            assert max(served.values()) - min(served.values()) <= 2 * most


def test_whoever_was_given_least_for_its_weight_is_next() -> None:
    tickets = [_ticket(f"{org}{i}", org=org, order=10 * i + n) for n, org in enumerate("abc") for i in range(2)]
    assert _in_order(Order(_fifos(tickets, {"a": 25.0, "b": 12.0}), RULES)) == ["c0", "c1", "b0", "b1", "a0", "a1"]
    rules = Rules(org=lambda org: OrgPolicy(weight=4.0 if org == "a" else 1.0))
    flood = [_ticket(f"{org}{i}", org=org, order=10 * i + n) for n, org in enumerate("ab") for i in range(20)]
    assert Counter(name[0] for name in _in_order(Order(_fifos(flood), rules))[:10]) == {"a": 8, "b": 2}


def test_a_ticket_that_found_no_room_is_not_charged() -> None:
    tickets = [_ticket(f"{org}{i}", org=org, order=10 * i + n) for n, org in enumerate("ab") for i in range(2)]
    order, seen = Order(_fifos(tickets), RULES), []
    for turn in order:
        seen.append(turn.ticket.request_id)
        if turn.ticket.request_id != "a0":
            order.placed()
    assert seen == ["a0", "b0", "a1", "b1"]


def test_nothing_goes_ahead_of_a_ticket_that_was_not_read() -> None:
    """Two of a's were read; when both are placed, and it is the third one's turn, this round ends."""
    a = Fifo([_ticket(f"a{i}", org="a", order=i) for i in range(2)], 0.0, cut=True)
    b = Fifo([_ticket(f"b{i}", org="b", order=5 + i) for i in range(3)], 15.0)
    assert _in_order(Order([a, b], RULES)) == ["a0", "a1", "b0"]
    assert [turn.ticket.request_id for turn in Order([a, b], RULES)] == ["a0", "a1", "b0", "b1", "b2"], (
        "without room its third has none either"
    )


def test_a_ticket_that_comes_back_keeps_its_old_place() -> None:
    first, second, back = _ticket("first", order=1), _ticket("second", order=3), _ticket("back", org="b", order=2)
    assert _in_order(Order(_fifos([first, second, back]), RULES)) == ["first", "back", "second"]


def test_by_arrival_alone_neither_class_nor_org_nor_age_counts() -> None:
    tickets = [_ticket("b", BATCH, "x", 3, waited=900), _ticket("s", STANDARD, "x", 1), _ticket("r", REALTIME, "y", 2)]
    order = Order(_fifos(tickets, {"x": 99.0}), Rules(fifo=True), {MODEL: [0, 900, 0, 0]})
    assert [(turn.ticket.request_id, turn.first_of_all) for turn in order] == [("s", True), ("r", True), ("b", True)]


@pytest.mark.parametrize(
    ("max_tokens", "n", "delivered", "expected"), [(16, 1, 0, 16), (900, 2, 0, 200), (900, 2, 1700, 100), (5, 2, 99, 0)]
)
def test_expected_output_is_bounded_by_the_estimate_and_by_what_is_left(max_tokens: int, n: int, delivered: int, expected: int) -> None:
    ticket = replace(_ticket("r"), max_tokens=max_tokens, n=n, num_delivered_tokens=delivered)
    assert expected_output(ticket, 100) == expected


def test_positions_take_turns_between_orgs_by_their_weights() -> None:
    fifos = {"a": (5.0, [("a0", 1), ("a1", 2), ("a2", 3)]), "b": (0.0, [("b0", 8), ("b1", 9)])}
    assert positions(fifos, RULES) == {"b0": 0, "a0": 1, "b1": 2, "a1": 3, "a2": 4}
    heavy = Rules(org=lambda org: OrgPolicy(weight=2.0 if org == "a" else 1.0))
    assert sorted(positions(fifos, heavy).items(), key=lambda item: item[1])[:3] == [("a0", 0), ("b0", 1), ("a1", 2)]
    assert list(positions(fifos, Rules(fifo=True))) == ["a0", "a1", "a2", "b0", "b1"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 9)), max_size=30))
def test_positions_are_a_line_in_which_each_org_keeps_its_order(entries: list[tuple[str, float]]) -> None:
    fifos: dict[str, tuple[float, list[tuple[str, int]]]] = {}
    for order, (org, served) in enumerate(entries):
        fifos.setdefault(org, (served, []))[1].append((f"r{order}", order))
    told = positions(fifos, RULES)
    assert sorted(told.values()) == list(range(len(entries)))
    for _, queue in fifos.values():
        assert [told[name] for name, _ in queue] == sorted(told[name] for name, _ in queue)
