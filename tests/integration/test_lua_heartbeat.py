"""heartbeat.lua: renews leases, counts room afresh, revokes what is none, keeps what Redis had lost."""

from dataclasses import replace

from services.scheduler import keys
from services.scheduler.ledger import Lease, Queued
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker


async def test_room_is_what_is_used_and_what_leases_may_still_take(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker, blocks=10)
    await bench.place(make_ticket("b"), worker, blocks=5)
    await bench.beat(worker, lease, used=7, held=4)
    assert await bench.used(worker) == (2, 3 + 10 + 5), "3 are nobody's, a holds 4 of its 10, b hasn't started"
    await bench.beat(worker, lease, used=12, held=12)
    assert await bench.used(worker) == (2, 12 + 5), "a holds more than it reserved"


async def test_blocks_that_leases_share_count_once(bench: LedgerBench) -> None:
    worker = make_worker()
    leases = [await bench.place(make_ticket(name), worker, blocks=6) for name in "ab"]
    await bench.beat(worker, *leases, used=8, held=6)
    assert await bench.used(worker) == (2, 8)


async def test_a_lease_that_ran_and_is_gone_frees_its_room_before_it_ends(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.beat(worker, lease, used=2)
    await bench.beat(worker)
    assert await bench.used(worker) == (0, 0)
    assert await bench.finish("a", 1, 3) == (True, keys.line_name("tiny@fp32", 2))
    assert await bench.used(worker) == (0, 0), "not given back twice"


async def test_a_lease_that_has_not_started_keeps_its_room(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    await bench.beat(worker)
    assert await bench.used(worker) == (1, 2)


async def test_listing_renews(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    scores = []
    for _ in range(2):
        await bench.beat(worker, lease, tokens=5)
        scores.append(float(await bench.raw("ZSCORE", keys.RUNNING, "a")))
    assert scores[1] >= scores[0] > 0
    assert await bench.raw("ZSCORE", keys.STARTING, "a") is None
    assert await bench.raw("HGET", keys.ticket("a"), "tokens") == "5"


async def test_leases_that_moved_ended_or_were_withdrawn_are_revoked(bench: LedgerBench) -> None:
    """Case B38: the old worker resumes and lists what others have now."""
    old, new = make_worker("old"), make_worker("new")
    moved, ended, withdrawn = [await bench.place(make_ticket(name), old) for name in ("moved", "ended", "withdrawn")]
    await bench.beat(old, moved, ended)
    await bench.enqueue(make_ticket("moved"), lost_epoch=1)
    await bench.ledger.register("new", "i1")
    again = await bench.commit(make_ticket("moved"), new)
    assert isinstance(again, Lease)
    await bench.finish("ended", 1, 1)
    await bench.ledger.withdraw("withdrawn", "h", "withdrawn")
    assert await bench.beat(old, moved, ended, withdrawn) == [("moved", 1), ("ended", 1), ("withdrawn", 1)]
    assert await bench.beat(new, again) == []


async def test_a_ticket_that_waits_to_be_placed_again_is_revoked_at_its_old_worker(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.beat(worker, lease)
    await bench.enqueue(make_ticket("a"), lost_epoch=1)
    assert await bench.beat(worker, lease) == [("a", 1)]
    assert await bench.waiting() == ["a"]


async def test_an_old_incarnation_is_told(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i2")
    assert await bench.beat(make_worker(incarnation="i1")) is None


async def test_running_streams_survive_a_flush(bench: LedgerBench) -> None:
    """Case F10: what runs goes on, and ends by Finish as ever."""
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.beat(worker, lease)
    await bench.raw("FLUSHALL")
    assert await bench.beat(worker, lease, used=2) == []
    assert await bench.used(worker) == (1, 2)
    assert (await bench.ledger.survey()).num_leases == 1
    assert (await bench.finish("a", 1, 3))[0]
    assert await bench.used(worker) == (0, 0)


async def test_a_lease_taken_from_the_workers_word_can_move(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.raw("FLUSHALL")
    await bench.beat(worker, lease)
    assert isinstance(await bench.enqueue(make_ticket("a"), lost_epoch=1), Queued)
    again = await bench.commit(make_ticket("a"), worker)
    assert isinstance(again, Lease)
    assert again.epoch == 2
    assert await bench.beat(worker, lease) == [("a", 1)]


async def test_a_copy_of_redis_that_lags_behind_believes_the_higher_epoch(bench: LedgerBench) -> None:
    """Case F11: the write of the second placement was lost with the old primary; its worker runs it."""
    old, new = make_worker("old"), make_worker("new")
    lease = await bench.place(make_ticket("a"), old)
    await bench.ledger.register("new", "i1")
    newer = replace(lease, epoch=2, worker_id="new")
    assert await bench.beat(new, newer) == []
    assert await bench.beat(old, lease) == [("a", 1)]
    await bench.queue(make_ticket("b"))
    assert await bench.beat(new, newer, replace(newer, request_id="b", epoch=1)) == []
    assert await bench.waiting() == [], "b runs already: it must not be placed a second time"


async def test_an_expired_lease_that_runs_is_revived(bench: LedgerBench) -> None:
    """Nobody else has it: ending it would break a stream for nothing."""
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.beat(worker, lease)
    assert await bench.sweep_until("a") == "expired"
    assert await bench.beat(worker, lease, used=2) == []
    assert await bench.used(worker) == (1, 2)
    assert await bench.raw("TTL", keys.ticket("a")) == -1
    assert (await bench.finish("a", 1, 3))[0]


async def test_what_is_served_is_noted(bench: LedgerBench) -> None:
    await bench.beat(make_worker())
    serving = (await bench.ledger.survey()).serving
    assert list(serving) == [("tiny@fp32", "v1")]
    assert 0 <= serving["tiny@fp32", "v1"] < 10
