"""commit.lua: one placement per ticket, never more than fits, only where the policy looked."""

import asyncio
from dataclasses import replace

import pytest

from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.ledger import Lease
from services.scheduler.policy.pick import Placement
from services.scheduler.policy.rules import Rules
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker


async def test_a_commit_debits_the_worker_and_takes_the_ticket(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker, slots=2, blocks=7)
    assert (lease.request_id, lease.epoch, lease.worker_id, lease.incarnation, lease.address) == ("a", 1, "w1", "i1", "w1:1")
    assert 0 <= lease.queued_seconds < 10
    assert await bench.used(worker) == (2, 7)
    assert await bench.waiting() == []
    assert (await bench.ledger.survey()).num_leases == 1


async def test_only_one_of_many_commits_of_a_ticket_wins(bench: LedgerBench) -> None:
    worker = make_worker(slots=50)
    await bench.ledger.register("w1", "i1")
    ticket = await bench.queue(make_ticket("a"))
    outcomes = await asyncio.gather(*(bench.commit(ticket, worker) for _ in range(20)))
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Lease"] + ["str"] * 19
    assert set(outcomes) >= {"ticket"}
    assert await bench.used(worker) == (1, 2)


async def test_many_commits_at_once_never_overfill_a_worker(bench: LedgerBench) -> None:
    worker = make_worker(slots=8, num_blocks=20)
    await bench.ledger.register("w1", "i1")
    tickets = [await bench.queue(make_ticket(f"r{i}")) for i in range(30)]
    outcomes = await asyncio.gather(*(bench.commit(ticket, worker, blocks=3) for ticket in tickets))
    assert sum(isinstance(outcome, Lease) for outcome in outcomes) == 6
    assert outcomes.count("room") == 24
    assert await bench.used(worker) == (6, 18)


@pytest.mark.parametrize(("slots", "blocks"), [(5, 1), (1, 65)])
async def test_what_does_not_fit_is_refused(bench: LedgerBench, slots: int, blocks: int) -> None:
    await bench.ledger.register("w1", "i1")
    ticket = await bench.queue(make_ticket("a"))
    assert await bench.commit(ticket, make_worker(), slots=slots, blocks=blocks) == "room"
    assert await bench.waiting() == ["a"]


async def test_another_incarnation_or_a_worker_that_is_down_is_refused(bench: LedgerBench) -> None:
    ticket = await bench.queue(make_ticket("a"))
    assert await bench.commit(ticket, make_worker()) == "incarnation"
    await bench.ledger.register("w1", "i2")
    assert await bench.commit(ticket, make_worker()) == "incarnation"
    await bench.ledger.down("w1", "i2")
    assert await bench.commit(ticket, make_worker(incarnation="i2")) == "down"


async def test_only_equal_and_higher_classes_count_unless_engines_do_not_preempt(bench: LedgerBench) -> None:
    worker = make_worker(slots=2)
    await bench.place(make_ticket("batch", latency_class=3), worker, slots=2)
    realtime = await bench.queue(make_ticket("now", latency_class=1))
    assert await bench.commit(realtime, worker, rules=Rules(preemptible=False)) == "room"
    assert isinstance(await bench.commit(realtime, worker), Lease)
    other_batch = await bench.queue(make_ticket("other", latency_class=3))
    assert await bench.commit(other_batch, worker) == "room"


async def test_an_org_holds_no_more_than_its_share_of_a_worker(bench: LedgerBench) -> None:
    """In any class, and again once its leases have ended; the other orgs have the rest."""
    worker, rules = make_worker(slots=9), Rules(org=lambda org: OrgPolicy(kv_share=0.5 if org == "acme" else 1.0))
    await bench.place(make_ticket("a", latency_class=3), worker, blocks=30)
    more, other = await bench.queue(make_ticket("b")), await bench.queue(make_ticket("c", org="42"))
    assert await bench.commit(more, worker, blocks=3, rules=rules) == "share"
    assert isinstance(await bench.commit(other, worker, blocks=34, rules=rules), Lease)
    assert isinstance(await bench.commit(more, worker, blocks=2, rules=rules), Lease)
    assert (await bench.view(worker)).workers[0].org_blocks == {"acme": 32, "42": 34}
    again = await bench.queue(make_ticket("d"))
    assert await bench.commit(again, worker, blocks=1, rules=rules) == "share"
    await bench.finish("b", 1, 3)
    assert isinstance(await bench.commit(again, worker, blocks=2, rules=rules), Lease)


async def test_what_leases_hold_by_org_is_counted_afresh_with_each_heartbeat(bench: LedgerBench) -> None:
    worker = make_worker(slots=9)
    leases = [await bench.place(make_ticket(name, org=org), worker, blocks=3) for name, org in (("a", "x"), ("b", "y"), ("c", "x"))]
    await bench.beat(worker, *leases, used=12, held=4)
    assert (await bench.view(worker)).workers[0].org_blocks == {"x": 8, "y": 4}
    await bench.beat(worker, leases[1], used=4, held=4)
    assert (await bench.view(worker)).workers[0].org_blocks == {"x": 0, "y": 4}


async def test_nothing_is_placed_after_its_deadline(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i1")
    ticket = await bench.queue(make_ticket("late"))
    await bench.raw("HSET", keys.ticket("late"), "deadline", 1)
    assert await bench.commit(ticket, make_worker()) == "deadline"
    assert (await bench.view(make_worker())).fifos == []


async def test_a_plan_is_committed_in_one_go_with_an_outcome_for_each(bench: LedgerBench) -> None:
    worker = make_worker(slots=2)
    await bench.ledger.register("w1", "i1")
    tickets = [await bench.queue(make_ticket(f"r{i}")) for i in range(3)]
    outcomes = await bench.ledger.commit([Placement(ticket, worker, 1, 1, 64) for ticket in tickets], Rules())
    assert [outcome.request_id if isinstance(outcome, Lease) else outcome for outcome in outcomes] == ["r0", "r1", "room"]


async def test_every_attempt_has_a_higher_epoch(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    epochs = []
    for _ in range(3):
        ticket = make_ticket("a", excluded_workers=frozenset({"w1"}))
        await bench.enqueue(ticket, lost_epoch=len(epochs) + 1)
        lease = await bench.commit(replace(ticket), worker)
        assert isinstance(lease, Lease)
        epochs.append(lease.epoch)
    assert epochs == [2, 3, 4]
