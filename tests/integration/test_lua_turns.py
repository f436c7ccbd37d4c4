"""What commit, finish, enqueue and the ends of tickets do to the turns of orgs in their line."""

import pytest

from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.ledger import Lease
from services.scheduler.policy.order import Order
from services.scheduler.policy.pick import plan
from services.scheduler.policy.rules import Rules
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker

WORKER = make_worker(slots=99, num_blocks=9999)
RULES = Rules(output_estimate=100)


async def _queue(bench: LedgerBench, org: str, *names: str) -> None:
    for name in names:
        await bench.queue(make_ticket(name, org=org, num_prompt_tokens=50, max_tokens=500))


async def _commit(bench: LedgerBench, org: str, name: str, rules: Rules = RULES) -> Lease:
    lease = await bench.commit(make_ticket(name, org=org, num_prompt_tokens=50, max_tokens=500), WORKER, rules=rules)
    assert isinstance(lease, Lease), lease
    return lease


async def _served(bench: LedgerBench, org: str) -> float | None:
    return await bench.served(make_ticket(org=org))


@pytest.fixture(autouse=True)
async def _registered(bench: LedgerBench) -> None:
    await bench.ledger.register(WORKER.worker_id, WORKER.incarnation)


async def test_a_placement_is_charged_by_weight_and_corrected_to_what_was_used(bench: LedgerBench) -> None:
    await _queue(bench, "x", "x1", "x2", "x3")
    await _commit(bench, "x", "x1")
    assert await _served(bench, "x") == 150
    await _commit(bench, "x", "x2", Rules(output_estimate=100, org=lambda _: OrgPolicy(weight=2.5)))
    assert await _served(bench, "x") == 150 + 60
    await bench.finish("x1", 1, 7)
    assert await _served(bench, "x") == 57 + 60
    await bench.finish("x2", 1, 350)
    assert await _served(bench, "x") == 57 + 160


async def test_tokens_delivered_before_are_not_charged_twice(bench: LedgerBench) -> None:
    await _queue(bench, "x", "x1", "x2")
    ticket = make_ticket("x1", org="x", num_prompt_tokens=50, max_tokens=130, num_delivered_tokens=100)
    await bench.queue(ticket)
    assert isinstance(await bench.commit(ticket, WORKER, rules=RULES), Lease)
    assert await _served(bench, "x") == 50 + 30
    await bench.finish("x1", 1, 110)
    assert await _served(bench, "x") == 50 + 10


async def test_what_never_started_is_not_charged(bench: LedgerBench) -> None:
    await _queue(bench, "x", "x1", "x2", "x3")
    lease = await _commit(bench, "x", "x1")
    await _commit(bench, "x", "x2")
    await bench.ledger.withdraw("x1", "h", "withdrawn")
    assert await _served(bench, "x") == 150
    await bench.beat(WORKER, lease)
    await bench.enqueue(make_ticket("x2", org="x", num_prompt_tokens=50, max_tokens=500), lost_epoch=1)
    assert await _served(bench, "x") == 0


@pytest.mark.parametrize("started", [True, False])
async def test_a_finish_after_an_outage_charges_what_was_used(bench: LedgerBench, started: bool) -> None:
    await _queue(bench, "x", "x1", "x2")
    lease = await _commit(bench, "x", "x1")
    if started:
        await bench.beat(WORKER, lease)
    await bench.ledger.register(WORKER.worker_id, "i2")
    assert await _served(bench, "x") == (150 if started else 0)
    for _ in range(2):
        await bench.finish("x1", 1, 7)
    assert await _served(bench, "x") == 57


async def test_newcomers_are_lifted_to_the_least_of_those_that_wait(bench: LedgerBench) -> None:
    await _queue(bench, "x", *(f"x{i}" for i in range(9)))
    await _queue(bench, "y", *(f"y{i}" for i in range(9)))
    for name in ("x0", "x1", "y0", "x2"):
        await _commit(bench, name[0], name)
    await _queue(bench, "new", "n0")
    assert [await _served(bench, org) for org in ("x", "y", "new")] == [450, 150, 150]


async def test_an_org_that_was_idle_keeps_what_it_had_beyond_the_others_and_nothing_that_it_saved(bench: LedgerBench) -> None:
    await _queue(bench, "x", *(f"x{i}" for i in range(9)))
    await _queue(bench, "greedy", "g0", "g1")
    await _queue(bench, "idle", "i0")
    for name, org in (("g0", "greedy"), ("g1", "greedy"), ("i0", "idle"), ("x0", "x")):
        await _commit(bench, org, name)
    await _queue(bench, "greedy", "g2")
    assert await _served(bench, "greedy") == 300, "it came back at once"
    for i in range(1, 7):
        await _commit(bench, "x", f"x{i}")
    await _queue(bench, "idle", "i1")
    assert await _served(bench, "idle") == 300, "not 150: it has no claim on the time in which it asked for nothing"


async def test_a_line_that_was_empty_goes_on_where_it_was(bench: LedgerBench) -> None:
    await _queue(bench, "x", "x0", "x1")
    await _commit(bench, "x", "x0")
    await _commit(bench, "x", "x1")
    assert await _served(bench, "x") is None
    await _queue(bench, "y", "y0")
    await _queue(bench, "x", "x2")
    assert [await _served(bench, org) for org in "xy"] == [300, 300]


async def test_orgs_that_are_gone_are_forgotten(bench: LedgerBench) -> None:
    line = keys.line_name("tiny@fp32", 2)
    for i in range(20):
        await _queue(bench, f"org{i}", f"r{i}")
        await _commit(bench, f"org{i}", f"r{i}")
        await bench.finish(f"r{i}", 1, 5)
    assert await bench.raw("EXISTS", keys.turns(line)) == 0
    assert await bench.raw("ZCARD", f"{keys.PREFIX}spent:{line}") == 20
    for name in (f"spent:{line}", f"clock:{line}", "recent:tiny@fp32"):
        assert 0 < await bench.raw("TTL", keys.PREFIX + name) <= 3600


async def test_each_line_has_its_own_turns(bench: LedgerBench) -> None:
    """Orgs compete for the workers of one model in one class; what one has elsewhere is no one's loss here."""
    await _queue(bench, "x", "x0", "x1")
    await _commit(bench, "x", "x0")
    batch = make_ticket("b", org="x", latency_class=3)
    await bench.queue(batch)
    assert (await _served(bench, "x"), await bench.served(batch)) == (150, 0)


async def test_whose_turn_it_is_decides_what_is_placed(bench: LedgerBench) -> None:
    """The flood of one org waits while another has its share: with the policy, over the view."""
    await _queue(bench, "flood", *(f"f{i}" for i in range(30)))
    await _queue(bench, "small", *(f"s{i}" for i in range(5)))
    worker = make_worker(slots=10, num_blocks=9999)
    view = await bench.view(worker)
    placements = plan(Order(view.fifos, RULES, view.recent), view.workers, RULES)
    orgs = [placement.ticket.org for placement in placements]
    assert (len(orgs), orgs.count("small")) == (10, 5)
    outcomes = await bench.ledger.commit(placements, RULES)
    assert all(isinstance(outcome, Lease) for outcome in outcomes)
    assert await _served(bench, "flood") == 5 * 150
