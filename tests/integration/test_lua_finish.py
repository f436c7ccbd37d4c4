"""finish.lua: ends a lease once; an old epoch changes nothing."""

from services.scheduler import keys
from services.scheduler.ledger import Lease
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker

LINE = keys.line_name("tiny@fp32", 2)


async def test_finish_frees_the_room_and_is_idempotent(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    assert await bench.finish("a", 1, 9) == (True, LINE)
    assert await bench.finish("a", 1, 9) == (False, "")
    assert await bench.used(worker) == (0, 0)
    assert (await bench.ledger.survey()).num_leases == 0


async def test_an_old_epoch_changes_nothing(bench: LedgerBench) -> None:
    """Cases B38 and F21: a late word of the old attempt doesn't count for the new one."""
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    await bench.enqueue(make_ticket("a", excluded_workers=frozenset({"w1"})), lost_epoch=1)
    assert await bench.finish("a", 1, 9) == (False, ""), "queued again"
    assert isinstance(await bench.commit(make_ticket("a"), worker), Lease)
    assert await bench.finish("a", 1, 9) == (False, "")
    assert await bench.used(worker) == (1, 2)
    assert await bench.finish("a", 2, 9) == (True, LINE)


async def test_an_unknown_request_is_not_ended(bench: LedgerBench) -> None:
    assert await bench.finish("nobody", 1, 0) == (False, "")


async def test_a_thousand_duplicates_end_it_once(bench: LedgerBench) -> None:
    await bench.place(make_ticket("a"), make_worker())
    outcomes = [await bench.finish("a", 1, 9) for _ in range(1000)]
    assert [ended for ended, _ in outcomes].count(True) == 1


async def test_nothing_is_left_of_finished_requests_but_what_expires(bench: LedgerBench) -> None:
    """Case F22."""
    worker = make_worker(slots=100, num_blocks=1000)
    for i in range(50):
        await bench.place(make_ticket(f"r{i}"), worker)
        await bench.finish(f"r{i}", 1, 1)
    lasting = [key for key in await bench.raw("KEYS", keys.PREFIX + "*") if await bench.raw("TTL", key) == -1]
    assert sorted(lasting) == [keys.PREFIX + "order", keys.worker("w1")]
