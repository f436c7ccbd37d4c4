"""What a placement tells of its choice: terms of cost, refusals by reason, why it waited; bounded, and the same behind its JSON."""

from dataclasses import replace

from services.policy.org import OrgPolicy
from services.scheduler.policy.decision import MAX_CANDIDATES, OLD_TERMS, Decision, dumps, loads
from services.scheduler.policy.fleet import Worker
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import plan
from services.scheduler.policy.routing import ROUTINGS
from services.scheduler.policy.rules import Rules
from services.scheduler.wire import decision_to_proto
from tests.scheduler_harness import MODEL, make_ticket, make_worker


def _decide(ticket: Ticket, workers: list[Worker], rules: Rules | None = None, *, memory: Memory | None = None) -> Decision | None:
    rules = rules or Rules(routing=ROUTINGS["prefix"])
    placements = plan(Order([Fifo([ticket])], rules), workers, rules, memory)
    return placements[0].decision if placements else None


def _used(worker_id: str, slots: int, blocks: int = 0, *, latency_class: int = 2) -> Worker:
    used_slots, used_blocks = (tuple(num if c == latency_class else 0 for c in range(4)) for num in (slots, blocks))
    return replace(make_worker(worker_id), used_slots=used_slots, used_blocks=used_blocks)


def test_candidates_come_by_cost_and_the_refused_behind_them_with_why() -> None:
    other = replace(make_worker("other"), models={})
    small = replace(make_worker("small"), models={MODEL: replace(make_worker().models[MODEL], max_model_len=16)})
    ticket = make_ticket(excluded_workers=frozenset({"away"}))
    decision = _decide(ticket, [_used("busy", 3, 32), other, small, make_worker("away"), _used("full", 4), _used("free", 0)])
    assert decision is not None
    assert decision.num_candidates == 6
    assert [(c.worker_id, c.refused) for c in decision.candidates] == [
        ("free", ""),
        ("busy", ""),
        ("other", "unserved"),
        ("small", "too_small"),
        ("away", "excluded"),
        ("full", "room"),
    ]
    assert dict(zip(decision.terms, decision.candidates[1].cost, strict=True)) == {
        "waiting": 0,
        "preempted": 0,
        "prefill": 64,
        "load": 0.75,
        "rivals": 0.75,
        "cache": 0.5,
    }


def test_what_would_be_preempted_is_a_cost() -> None:
    decision = _decide(make_ticket(latency_class=1), [_used("w1", 4, latency_class=3)])
    assert decision is not None
    assert decision.candidates[0].cost[1] == 0.25


def test_an_orgs_share_is_a_reason() -> None:
    rules = Rules(org=lambda _: OrgPolicy("acme", kv_share=0.5))
    mine = replace(_used("mine", 1, 31), org_blocks={"acme": 31})
    decision = _decide(make_ticket(), [mine, _used("free", 0)], rules)
    assert decision is not None
    assert [(c.worker_id, c.refused) for c in decision.candidates] == [("free", ""), ("mine", "share")]


def test_why_it_waited_is_remembered_until_it_is_placed() -> None:
    memory = Memory()
    for workers, why in (([_used("w1", 4)], "room"), ([replace(make_worker(), models={})], "unserved")):
        assert _decide(make_ticket(), workers, memory=memory) is None
        assert memory.waited == {"r": why}
    assert _decide(make_ticket(excluded_workers=frozenset({"w1"})), [make_worker()], memory=memory) is None
    decision = _decide(make_ticket(), [make_worker()], memory=memory)
    assert decision is not None
    assert decision.waited_for == "excluded"
    memory.committed(make_ticket(), make_worker(), 16, now=0.0)
    assert memory.waited == {}


def test_room_that_is_kept_for_a_ticket_before_it_is_a_reason() -> None:
    rules, memory = Rules(), Memory()
    big, small = make_ticket("big", n=4, order=1), make_ticket("small", order=2)
    assert plan(Order([Fifo([big, small])], rules), [_used("w1", 1)], rules, memory) == []
    assert memory.waited == {"big": "room", "small": "kept"}


def test_a_large_fleet_is_told_in_part() -> None:
    workers = [_used(f"w{i}", i % 4) for i in range(50)]
    decision = _decide(make_ticket(), workers)
    assert decision is not None
    assert (decision.num_candidates, len(decision.candidates)) == (50, MAX_CANDIDATES)
    costs = [tuple(candidate.cost) for candidate in decision.candidates]
    assert costs == sorted(costs)


def test_it_survives_its_json_and_the_wire() -> None:
    decision = _decide(make_ticket(), [_used("w1", 1), _used("w2", 4), _used("w3", 2)])
    assert decision is not None
    text = dumps(decision, "s1")
    candidates = [replace(c, cost=tuple(c.cost)) for c in decision.candidates]
    assert loads(text) == replace(decision, scheduler_id="s1", terms=tuple(decision.terms), candidates=candidates)
    wire = decision_to_proto(text)
    assert wire is not None
    assert [c.chosen for c in wire.candidates] == [True, False, False]
    assert [term.name for term in wire.candidates[1].cost] == list(decision.terms)
    assert wire.scheduler_id == "s1"
    assert decision_to_proto("") is None


def test_what_was_written_down_before_costs_had_names_has_those_of_then() -> None:
    decision = loads('["s1",1,"",[["w1","",0,0,64,0.75,0.75,0.5]]]')
    assert decision is not None
    assert dict(zip(decision.terms, decision.candidates[0].cost, strict=True))["prefill"] == 64
    assert tuple(decision.terms) == OLD_TERMS
