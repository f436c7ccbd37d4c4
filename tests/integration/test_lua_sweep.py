"""sweep.lua: ends what nobody speaks for, and only that."""

from services.scheduler import keys
from services.scheduler.ledger import Ended, Queued, Timing
from tests.scheduler_harness import LedgerBench, ledger_bench, make_ticket, make_worker, until


async def test_a_queued_ticket_without_a_stream_is_dropped(bench: LedgerBench) -> None:
    await bench.queue(make_ticket("a"))
    assert await bench.sweep_until("a") == "dropped"
    assert await bench.waiting() == []
    assert isinstance(await bench.enqueue(make_ticket("a")), Queued), "and may come back"


async def test_a_lease_that_never_started_is_over(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    assert await bench.sweep_until("a") == "not started"
    assert await bench.used(worker) == (0, 0)


async def test_a_lease_that_is_not_renewed_is_settled_from_its_last_count(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.beat(worker, lease, tokens=42, used=2)
    ended: list[Ended] = []

    async def swept() -> bool:
        ended.extend(await bench.ledger.sweep())
        return bool(ended)

    await until(swept)
    assert ended == [Ended("a", "expired", keys.line_name("tiny@fp32", 2), 1, "w1", 42)]
    assert await bench.used(worker) == (0, 0)
    assert await bench.finish("a", 1, 50) == (False, ""), "settled already"


async def test_time_without_a_sweep_is_held_against_nobody(redis_server) -> None:
    """Cases F10 and F23: Redis or every scheduler was away, or the clock jumped; everybody gets a full term again."""
    async with ledger_bench(redis_server.url, timing=Timing(60, 60, 60, 5)) as bench:
        worker = make_worker()
        lease = await bench.place(make_ticket("running"), worker)
        await bench.beat(worker, lease)
        await bench.place(make_ticket("starting"), worker)
        await bench.queue(make_ticket("queued"))
        assert await bench.ledger.sweep() == []
        hour = 3_600_000
        for key, name in ((keys.RUNNING, "running"), (keys.STARTING, "starting"), (keys.HELD, "queued")):
            await bench.raw("ZINCRBY", key, -hour, name)
        await bench.raw("HINCRBY", keys.SWEPT, "at", -hour)
        await bench.raw("HINCRBY", keys.SWEPT, "since", -hour)
        assert await bench.ledger.sweep() == []
        await bench.raw("HINCRBY", keys.SWEPT, "since", -hour)
        assert {(ended.request_id, ended.reason) for ended in await bench.ledger.sweep()} == {
            ("running", "expired"),
            ("starting", "not started"),
            ("queued", "dropped"),
        }


async def test_a_clock_set_back_keeps_nothing_alive_for_ever(redis_server) -> None:
    async with ledger_bench(redis_server.url, timing=Timing(60, 60, 60, 5)) as bench:
        await bench.queue(make_ticket("a"))
        await bench.raw("ZINCRBY", keys.HELD, 3_600_000, "a")
        assert await bench.ledger.sweep() == []
        await bench.raw("HINCRBY", keys.SWEPT, "since", -61_000)
        assert [ended.reason for ended in await bench.ledger.sweep()] == ["dropped"]


async def test_no_entry_outlives_its_ticket(bench: LedgerBench) -> None:
    """Case F22: at rest the indexes hold exactly what is in flight."""
    worker = make_worker(slots=100, num_blocks=1000)
    await bench.beat(worker)
    for i in range(10):
        lease = await bench.place(make_ticket(f"run{i}"), worker)
        if i % 2:
            await bench.beat(worker, lease)
        await bench.queue(make_ticket(f"wait{i}"))
    ended: set[str] = set()

    async def all_swept() -> bool:
        ended.update(e.request_id for e in await bench.ledger.sweep())
        return len(ended) == 20

    await until(all_swept)
    lasting = [key for key in await bench.raw("KEYS", keys.PREFIX + "*") if await bench.raw("TTL", key) == -1]
    assert sorted(lasting) == sorted([keys.PREFIX + "order", keys.SERVING, keys.SWEPT, keys.worker("w1")])


async def test_deadlines_that_pass_in_the_queue_end_tickets_whoever_queued_them(redis_server) -> None:
    async with ledger_bench(redis_server.url, timing=Timing(60, 60, 60, 5)) as bench:
        for name in ("late", "early"):
            await bench.queue(make_ticket(name, latency_class=3))
        await bench.raw("ZADD", keys.DEADLINES, 1, "late")
        line = keys.line_name("tiny@fp32", 3)
        assert await bench.ledger.sweep() == [Ended("late", "deadline", line, 0, "", 0)]
        assert await bench.waiting() == ["early"]
        await bench.place(make_ticket("runs"), make_worker())
        assert await bench.raw("ZRANGE", keys.DEADLINES, 0, -1) == ["early"], "what runs has its deadline on its worker"


async def test_a_clock_set_forward_ends_no_stream_that_has_time_left(redis_server) -> None:
    """Case F23: its scheduler, which counts on a clock of its own, queues it again at its old place."""
    async with ledger_bench(redis_server.url, timing=Timing(60, 60, 60, 5)) as bench:
        first = await bench.queue(make_ticket("first"))
        await bench.queue(make_ticket("second"))
        await bench.raw("HSET", keys.ticket("first"), "deadline", 1)
        await bench.raw("ZADD", keys.DEADLINES, 1, "first")
        assert [ended.reason for ended in await bench.ledger.sweep()] == ["deadline"]
        again = await bench.enqueue(first, deadline_seconds=30)
        assert isinstance(again, Queued)
        assert 29 <= again.left_seconds <= 30
        assert await bench.waiting() == ["first", "second"]
