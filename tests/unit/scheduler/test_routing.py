"""What each rule takes for the cheapest worker, and what a cost is made of."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.fleet import Worker
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.node import NodeState, StepCost
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import MAX_ALL, Placement, plan
from services.scheduler.policy.prefix_index import PrefixIndex
from services.scheduler.policy.routing import ROUTINGS, paper_health
from services.scheduler.policy.rules import Rules
from tests.scheduler_harness import MODEL, make_ticket, make_worker

FAST = NodeState(step=StepCost(0.005, 20e-6, 10e-6, 50e-9), max_step_tokens=2048)
SLOW = replace(FAST, step=StepCost(0.009, 70e-6, 10e-6, 80e-9))


def _worker(name: str, node: NodeState = FAST, *, used: int = 0, blocks: int = 0, max_slots: int = 40) -> Worker:
    worker = make_worker(name, f"of {name}", slots=max_slots, num_blocks=4096)
    model = replace(next(iter(worker.models.values())), max_model_len=1 << 16)
    models = dict.fromkeys(worker.models, model)
    return replace(worker, models=models, node=node, used_slots=(0, 0, used, 0), used_blocks=(0, 0, blocks, 0))


def _ticket(request_id: str = "r", *, prompt: int = 2000, **fields: object) -> Ticket:
    return make_ticket(request_id, num_prompt_tokens=prompt, max_tokens=200, **fields)


def _place(
    workers: list[Worker],
    routing: str = "seconds",
    *,
    ticket: Ticket | None = None,
    memory: Memory | None = None,
    rules: Rules | None = None,
) -> Placement:
    rules = rules or Rules(routing=ROUTINGS[routing])
    (placement,) = plan(Order([Fifo([ticket or _ticket()])], rules), workers, rules, memory)
    return placement


def _cost(placement: Placement, place: int = 0) -> dict[str, float]:
    assert placement.decision is not None
    return dict(zip(placement.decision.terms, placement.decision.candidates[place].cost, strict=True))


def _where(*workers: Worker, **options: object) -> str:
    return _place(list(workers), **options).worker.worker_id  # type: ignore[arg-type]


def test_seconds_are_the_sum_of_their_parts() -> None:
    memory = Memory()
    memory.backlog.told("of w1", 5000, 0.0, (), 0.0)
    rules = Rules(distance=lambda here, there: 0.03)
    absent = replace(FAST, absent={MODEL: 0.7})
    cost = _cost(_place([_worker("w1", absent, used=8, blocks=900)], memory=memory, rules=rules))
    parts = [cost[f"{part}_seconds"] for part in ("queue", "weights", "prefill", "load", "slowdown", "network")]
    assert all(part > 0 for part in parts)
    assert cost["seconds"] == pytest.approx(sum(parts))
    assert (cost["network_seconds"], cost["weights_seconds"]) == (0.03, 0.7)


@pytest.mark.parametrize("routing", ["seconds", "paper"])
def test_a_request_goes_where_its_model_is_unless_the_queue_is_longer_than_the_load(routing: str) -> None:
    elsewhere, here = _worker("a", replace(FAST, absent={MODEL: 2.0, "other@fp32": 9.0})), _worker("b")
    assert _where(elsewhere, here, routing=routing) == "b"
    memory = Memory()
    memory.backlog.told("of b", 60_000, 0.0, (), 0.0)  # about 1.4 s
    assert _where(elsewhere, here, routing=routing, memory=memory) == "b"
    memory.backlog.told("of b", 120_000, 0.0, (), 0.0)
    placement = _place([elsewhere, here], routing, memory=memory)
    assert placement.worker.worker_id == "a"
    assert (_cost(placement)["weights_seconds"], _cost(placement, 1)["weights_seconds"]) == (2.0, 0.0)


def test_it_does_so_too_while_step_times_are_not_known() -> None:
    unknown = NodeState()
    elsewhere, here = _worker("a", replace(unknown, absent={MODEL: 2.0})), _worker("b", unknown)
    assert _where(elsewhere, here) == "b"
    memory = Memory()
    memory.backlog.told("of b", 1900, 0.0, (), 0.0)
    assert _where(elsewhere, here, memory=memory) == "b"
    memory.backlog.told("of b", 2100, 0.0, (), 0.0)
    assert _where(elsewhere, here, memory=memory) == "a"


def test_seconds_prefer_the_faster_worker_until_it_has_more_to_do() -> None:
    assert _where(_worker("a", SLOW), _worker("b", FAST)) == "b"
    memory = Memory()
    memory.backlog.told("of b", 100_000, 0.0, (), 0.0)
    assert _where(_worker("a", SLOW), _worker("b", FAST), memory=memory) == "a"


def test_seconds_prefer_the_cooler_worker_and_look_ahead() -> None:
    hot = replace(FAST, temperature_celsius=82.0)
    warming = replace(FAST, temperature_celsius=74.0, celsius_per_second=1.0)
    cool = replace(FAST, temperature_celsius=74.0, celsius_per_second=-1.0)
    assert _where(_worker("a", hot), _worker("b", cool)) == "b"
    assert _where(_worker("a", warming), _worker("b", cool)) == "b"


def test_seconds_go_where_the_prompt_is_unless_that_is_too_busy() -> None:
    ticket = _ticket(block_hashes="".join(f"{i:016x}" for i in range(30)), hash_tokens=64)
    memory = Memory()
    memory.index.sent(ticket, "of b", 1 << 20)
    assert _where(_worker("a"), _worker("b"), ticket=ticket, memory=memory) == "b"
    memory.backlog.told("of b", 60_000, 0.0, (), 0.0)
    assert _where(_worker("a"), _worker("b"), ticket=ticket, memory=memory) == "a"


def test_a_worker_of_another_region_costs_its_distance() -> None:
    near, far = replace(SLOW, region="eu"), replace(FAST, region="us")
    apart = {frozenset(("eu", "us")): 30.0}
    rules = Rules(distance=lambda here, there: apart.get(frozenset((here, there)), 0.0))
    assert _where(_worker("a", near), _worker("b", far), ticket=_ticket(region="eu"), rules=rules) == "a"
    assert _where(_worker("a", near), _worker("b", far), ticket=_ticket(region="us"), rules=rules) == "b"


def test_while_a_worker_is_cold_tokens_times_sequences_count() -> None:
    cold = replace(FAST, step=None)
    placement = _place([_worker("a", cold, used=3), _worker("b", used=1)])
    assert placement.worker.worker_id == "b"
    assert (_cost(placement)["tokens"], _cost(placement, 1)["tokens"]) == (2 * 2000, 4 * 2000)
    assert _cost(placement)["seconds"] == 0


def test_suspended_workers_get_what_nobody_else_has_room_for() -> None:
    out = _worker("a", replace(FAST, suspended=True))
    assert _where(out, _worker("b", SLOW, used=30)) == "b"
    assert _where(out, _worker("b", SLOW, used=42)) == "a"
    placement = _place([out, _worker("b", SLOW)])
    assert placement.decision is not None
    assert [(c.worker_id, c.refused) for c in placement.decision.candidates] == [("b", ""), ("a", "suspended")]


def test_the_papers_rule_adds_latency_and_utilisation_and_leaves_out_the_unhealthy() -> None:
    busy, idle = replace(FAST, utilization=0.9), replace(FAST, utilization=0.1)
    cost = _cost(_place([_worker("a", busy)], "paper"))
    rate = 2048 / (0.005 + 2048 * 20e-6 + 10e-6)
    assert cost["latency_seconds"] == pytest.approx((2000 + 200) / rate)
    assert cost["utilization_seconds"] == pytest.approx(0.45)
    assert _where(_worker("a", busy), _worker("b", idle), routing="paper") == "b"
    sick = _worker("a", replace(FAST, utilization=1.0, memory_free=0.0, num_queued=9, temperature_celsius=83.0))
    assert paper_health(sick) < 0.2
    memory = Memory()
    memory.backlog.told("of b", 10_000_000, 0.0, (), 0.0)
    assert _where(sick, _worker("b"), routing="paper", memory=memory) == "b", "though it is far cheaper"
    assert _where(sick, routing="paper") == "a", "unless all are"


def test_the_papers_health_is_its_formula() -> None:
    node = replace(FAST, utilization=0.5, memory_free=0.25, num_queued=2, temperature_celsius=41.5)
    assert paper_health(_worker("a", node)) == pytest.approx(0.3 * 0.5 + 0.3 * 0.25 + 0.1 * 0.5 + 0.3 / 3)


def test_round_robin_takes_turns_over_rounds_and_in_one() -> None:
    workers, memory, rules = [_worker(name) for name in "abc"], Memory(), Rules(routing=ROUTINGS["round_robin"])
    seen = []
    for number in range(2):
        tickets = [_ticket(f"r{number}{i}", order=i) for i in range(4)]
        for p in plan(Order([Fifo(tickets)], rules), workers, rules, memory):
            seen.append(p.worker.worker_id)
            memory.committed(p.ticket, p.worker, p.num_new_tokens, 0.0)
    assert "".join(seen) == "abcabcab"


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_what_was_only_planned_leaves_no_trace(routing: str) -> None:
    """Another scheduler may win the race."""
    memory, ticket = Memory(), _ticket(block_hashes="0" * 16, hash_tokens=64)
    _place([_worker("a"), _worker("b")], routing, ticket=ticket, memory=memory)
    assert memory.index.look_up(ticket).tokens("of a") == memory.backlog.tokens("of a", 0.0) == memory.num_placed == 0
    assert memory.turns == {}


def test_in_one_round_what_was_planned_counts() -> None:
    """Or a burst would go to one worker."""
    rules, workers = Rules(), [_worker(f"w{i}") for i in range(4)]
    tickets = [_ticket(f"r{i}", order=i) for i in range(8)]
    placed = plan(Order([Fifo(tickets)], rules), workers, rules)
    assert sorted(p.worker.worker_id for p in placed) == sorted(["w0", "w1", "w2", "w3"] * 2)


# --- large fleets


def _draw() -> Iterator[int]:
    return (number * 7919 for number in count())


def _large(ticket: Ticket, memory: Memory, workers: list[Worker]) -> Placement:
    rules, numbers = Rules(), _draw()
    (placement,) = plan(Order([Fifo([ticket])], rules), workers, rules, memory, draw=lambda below: next(numbers) % below)
    return placement


def test_of_a_large_fleet_a_few_are_looked_at_and_who_has_the_prompt_is_one_of_them() -> None:
    workers, memory = [_worker(f"w{i:03}", used=10) for i in range(256)], Memory()
    ticket = _ticket(block_hashes="".join(f"{i:016x}" for i in range(30)), hash_tokens=64)
    memory.index.sent(ticket, "of w200", 1 << 20)
    placement = _large(ticket, memory, workers)
    assert placement.worker.worker_id == "w200"
    assert placement.decision is not None
    assert len([c for c in placement.decision.candidates if not c.refused]) == MAX_ALL


def test_where_none_of_the_few_has_room_all_are_looked_at() -> None:
    workers = [_worker(f"w{i:03}", used=42) for i in range(255)] + [_worker("free")]
    workers = [replace(w, max_slots=42) for w in workers]
    assert _large(_ticket(), Memory(), workers).worker.worker_id == "free"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_the_best_holders_have_most_of_it(sent: list[list[int]], wanted: list[int]) -> None:
    def ticket(numbers: list[int]) -> Ticket:
        hashes = [f"{int(''.join(map(str, numbers[: i + 1])), 3) + 3 ** (i + 1):016x}" for i in range(len(numbers))]
        return _ticket(block_hashes="".join(hashes), hash_tokens=16)

    index = PrefixIndex()
    for number, numbers in enumerate(sent):
        index.sent(ticket(numbers), f"i{number}", 1 << 20)
    prefix = index.look_up(ticket(wanted))
    tokens = {f"i{number}": prefix.tokens(f"i{number}") for number in range(len(sent))}
    for number, numbers in enumerate(sent):
        alike = next((i for i, (a, b) in enumerate(zip(numbers, wanted, strict=False)) if a != b), min(len(numbers), len(wanted)))
        assert tokens[f"i{number}"] == 16 * alike
    holders = prefix.holders(3)
    assert len(holders) <= 3
    assert all(tokens[holder] for holder in holders)
    if any(tokens.values()):
        assert tokens[holders[0]] == max(tokens.values())
