"""register.lua: a restarted worker has none of its former leases."""

from services.scheduler.ledger import Queued
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker


async def test_registering_again_at_another_scheduler_changes_nothing(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    assert await bench.ledger.register("w1", "i1") == 0
    assert await bench.used(worker) == (1, 2)


async def test_another_incarnation_ends_the_leases_and_starts_empty(bench: LedgerBench) -> None:
    await bench.place(make_ticket("a"), make_worker())
    await bench.place(make_ticket("b"), make_worker())
    assert await bench.ledger.register("w1", "i2") == 2
    assert await bench.used(make_worker()) is None
    assert await bench.used(make_worker(incarnation="i2")) == (0, 0)
    assert (await bench.ledger.survey()).num_leases == 0
    assert isinstance(await bench.enqueue(make_ticket("a"), lost_epoch=1), Queued)
    assert await bench.used(make_worker(incarnation="i2")) == (0, 0), "the new incarnation gets nothing back for the old one's lease"


async def test_a_worker_that_was_down_is_up_again(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i1")
    await bench.ledger.down("w1", "i1")
    await bench.ledger.register("w1", "i1")
    assert await bench.used(make_worker()) == (0, 0)
