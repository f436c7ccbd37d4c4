"""view.lua: what the policy decides on."""

from services.scheduler import keys
from services.scheduler.policy.rules import Rules
from tests.scheduler_harness import MODEL, LedgerBench, make_ticket, make_worker


async def test_workers_come_with_their_room_by_class_and_org(bench: LedgerBench) -> None:
    worker = make_worker(slots=9)
    await bench.place(make_ticket("a", latency_class=1), worker, slots=1, blocks=2)
    await bench.place(make_ticket("b", latency_class=3, org="slots:2"), worker, slots=3, blocks=4)
    (seen,) = (await bench.view(worker)).workers
    assert (seen.used_slots, seen.used_blocks) == ((0, 1, 0, 3), (0, 2, 0, 4))
    assert seen.org_blocks == {"acme": 2, "slots:2": 4}


async def test_only_workers_that_may_be_used_are_seen(bench: LedgerBench) -> None:
    for name in ("up", "down"):
        await bench.ledger.register(name, "i1")
    await bench.ledger.down("down", "i1")
    workers = [make_worker(name) for name in ("up", "down", "unheard of")] + [make_worker("up", "i2")]
    usable = (await bench.view(*workers)).workers
    assert [(worker.worker_id, worker.incarnation) for worker in usable] == [("up", "i1")]


async def test_first_tickets_of_every_queue_and_no_more_than_asked_for(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i1")
    for i in range(20):
        for org in ("acme", "initech"):
            await bench.queue(make_ticket(f"{org}{i}", org=org))
    fifos = (await bench.view(make_worker(slots=50), max_heads=5)).fifos
    assert sorted([ticket.request_id for ticket in fifo.tickets] for fifo in fifos) == [
        [f"{org}{i}" for i in range(5)] for org in ("acme", "initech")
    ]
    assert all(fifo.cut for fifo in fifos)
    assert not any(fifo.cut for fifo in (await bench.view(make_worker(slots=50))).fifos)


async def test_many_queues_share_the_room_that_there_is(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i1")
    for i in range(5):
        for org in range(12):
            await bench.queue(make_ticket(f"{org}/{i}", org=str(org)))
    fifos = (await bench.view(make_worker(slots=4))).fifos
    assert [(len(fifo.tickets), fifo.cut) for fifo in fifos] == [(1, True)] * 12
    fifos = (await bench.view(make_worker(slots=28))).fifos
    assert [len(fifo.tickets) for fifo in fifos] == [3] * 12


async def test_nothing_is_read_of_a_class_for_which_nobody_has_a_slot(bench: LedgerBench) -> None:
    worker = make_worker(slots=1)
    await bench.place(make_ticket("a", latency_class=2), worker)
    for latency_class in (1, 2, 3):
        await bench.queue(make_ticket(f"r{latency_class}", latency_class=latency_class))
    assert [fifo.tickets[0].request_id for fifo in (await bench.view(worker)).fifos] == ["r1"], "it takes the room of a lower class"
    assert (await bench.view(worker, preemptible=False)).fifos == []


async def test_tickets_whose_deadline_has_passed_hold_nobody_up(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i1")
    for i in range(10):
        await bench.queue(make_ticket(f"r{i}"))
        if i < 8:
            await bench.raw("HSET", keys.ticket(f"r{i}"), "deadline", 1)
    (fifo,) = (await bench.view(make_worker(), max_heads=3)).fifos
    assert ([ticket.request_id for ticket in fifo.tickets], fifo.cut) == (["r8", "r9"], False)


async def test_what_was_placed_lately_is_told_by_class_and_fades(bench: LedgerBench) -> None:
    worker = make_worker(slots=9)
    await bench.place(make_ticket("a", latency_class=1, num_prompt_tokens=100, max_tokens=50), worker)
    await bench.place(make_ticket("b", latency_class=3, num_prompt_tokens=10, max_tokens=1000), worker)
    await bench.queue(make_ticket("c"))
    recent = (await bench.view(worker)).recent
    assert list(recent) == [MODEL]
    assert [round(tokens / 100, 1) for tokens in recent[MODEL]] == [0, 1.5, 0, round((10 + Rules().output_estimate) / 100, 1)]
    await bench.raw("HINCRBY", keys.recent(MODEL), "at", -1_000_000)
    assert [round(tokens) for tokens in (await bench.view(worker)).recent[MODEL]] == [0, 0, 0, 0]
