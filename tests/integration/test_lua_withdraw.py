"""withdraw.lua: a stream that ends before its lease takes its ticket along, unless a newer stream has it."""

from services.scheduler.ledger import Queued
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker


async def test_a_queued_ticket_is_gone_at_once(bench: LedgerBench) -> None:
    await bench.queue(make_ticket("a"), "h1")
    assert await bench.ledger.withdraw("a", "h1", "withdrawn")
    assert not await bench.ledger.withdraw("a", "h1", "withdrawn")
    assert await bench.waiting() == []


async def test_a_newer_stream_keeps_the_ticket(bench: LedgerBench) -> None:
    await bench.queue(make_ticket("a"), "h1")
    await bench.enqueue(make_ticket("a"), "h2")
    assert not await bench.ledger.withdraw("a", "h1", "withdrawn")
    assert await bench.waiting() == ["a"]


async def test_a_lease_that_its_stream_never_heard_of_ends_too(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker, holder="h1")
    assert await bench.ledger.withdraw("a", "h1", "withdrawn")
    assert await bench.used(worker) == (0, 0)


async def test_a_lease_that_runs_stays(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker, holder="h1")
    await bench.beat(worker, lease, used=2)
    assert not await bench.ledger.withdraw("a", "h1", "withdrawn")
    assert await bench.used(worker) == (1, 2)


async def test_a_withdrawn_ticket_may_come_back_to_its_old_place(bench: LedgerBench) -> None:
    """A gateway whose connection broke asks again, here or on another scheduler."""
    await bench.queue(make_ticket("a"), "h1")
    await bench.queue(make_ticket("b"))
    await bench.ledger.withdraw("a", "h1", "withdrawn")
    assert isinstance(await bench.enqueue(make_ticket("a"), "h2"), Queued)
    assert await bench.waiting() == ["a", "b"]
