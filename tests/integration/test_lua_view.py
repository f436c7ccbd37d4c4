"""view.lua: what the policy decides on."""

from tests.scheduler_harness import LedgerBench, make_ticket, make_worker


async def test_workers_come_with_their_room_by_class(bench: LedgerBench) -> None:
    worker = make_worker(slots=9)
    await bench.place(make_ticket("a", latency_class=1), worker, slots=1, blocks=2)
    await bench.place(make_ticket("b", latency_class=3), worker, slots=3, blocks=4)
    (seen,), _ = await bench.ledger.view([worker], 64)
    assert (seen.used_slots, seen.used_blocks) == ((0, 1, 0, 3), (0, 2, 0, 4))


async def test_only_workers_that_may_be_used_are_seen(bench: LedgerBench) -> None:
    for name in ("up", "down"):
        await bench.ledger.register(name, "i1")
    await bench.ledger.down("down", "i1")
    workers = [make_worker(name) for name in ("up", "down", "unheard of")] + [make_worker("up", "i2")]
    usable, _ = await bench.ledger.view(workers, 64)
    assert [(worker.worker_id, worker.incarnation) for worker in usable] == [("up", "i1")]


async def test_heads_of_every_queue_and_no_more_than_asked_for(bench: LedgerBench) -> None:
    worker = make_worker(slots=50)
    await bench.ledger.register("w1", "i1")
    for i in range(20):
        for org in ("acme", "initech"):
            await bench.queue(make_ticket(f"{org}{i}", org=org))
    _, fifos = await bench.ledger.view([worker], 5)
    assert sorted([ticket.request_id for ticket in fifo] for fifo in fifos) == [
        [f"{org}{i}" for i in range(5)] for org in ("acme", "initech")
    ]


async def test_nothing_is_read_while_nobody_has_a_slot(bench: LedgerBench) -> None:
    worker = make_worker(slots=1)
    await bench.place(make_ticket("a"), worker)
    await bench.queue(make_ticket("b"))
    _, fifos = await bench.ledger.view([worker], 64)
    assert fifos == []
