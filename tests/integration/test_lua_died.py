"""died.lua and what belongs to it: whoever dies twice at one place is not placed again; who may be to blame waits for the word on it."""

from services.common.errors import Code
from services.scheduler import keys
from services.scheduler.ledger import Lease, Quarantined, Queued
from tests.scheduler_harness import (
    LedgerBench,
    RunningScheduler,
    failure_of,
    fake_worker,
    lease_of,
    make_ticket,
    make_worker,
    running_scheduler,
    until,
    wire_ticket,
)

DEAD = (("w1", "i1"), ("w2", "i1"))


async def _die_once(bench: LedgerBench, epoch: int, position: int = 5) -> list[tuple[str, str]]:
    return await bench.ledger.died([("a", epoch, position)])


async def test_two_deaths_at_one_place_end_the_request(bench: LedgerBench) -> None:
    await bench.place(make_ticket("a"), make_worker())
    assert await _die_once(bench, 1) == []
    assert isinstance(await bench.enqueue(make_ticket("a"), lost_epoch=1), Queued), "one death is chance"
    [(request_id, line)] = await _die_once(bench, 2)
    assert request_id == "a"
    assert "tiny@fp32" in line
    assert await bench.enqueue(make_ticket("a"), lost_epoch=2) == Quarantined()
    assert await bench.waiting() == []


async def test_it_makes_no_difference_which_death_is_told_first_and_to_how_many(bench: LedgerBench) -> None:
    await bench.place(make_ticket("a"), make_worker())
    for _ in range(3):
        assert await _die_once(bench, 2) == []
    assert len(await _die_once(bench, 1)) == 1
    assert await _die_once(bench, 1) == [], "it is told once"


async def test_deaths_at_different_places_count_for_nothing(bench: LedgerBench) -> None:
    await bench.place(make_ticket("a"), make_worker())
    assert [await _die_once(bench, epoch, position=epoch) for epoch in range(1, 6)] == [[]] * 5


async def test_what_has_ended_or_is_unknown_is_left_alone(bench: LedgerBench) -> None:
    lease = await bench.place(make_ticket("a"), make_worker())
    await bench.finish("a", lease.epoch, 3)
    assert [await _die_once(bench, epoch) for epoch in (1, 2)] == [[], []]
    assert await bench.ledger.died([("never heard of", 1, 0), ("never heard of", 2, 0)]) == []


async def test_a_quarantined_lease_is_revoked_where_it_runs(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await _die_once(bench, 1)
    await _die_once(bench, 2)
    assert await bench.beat(worker, lease, used=2) == [("a", 1)]
    assert await bench.used(worker) == (0, 0)


async def test_a_suspect_waits_until_the_dead_have_come_back(bench: LedgerBench) -> None:
    for worker_id in ("w1", "w2", "w3"):
        await bench.ledger.register(worker_id, "i1")
    await bench.enqueue(make_ticket("a", awaited=DEAD))
    ticket, healthy = make_ticket("a"), make_worker("w3")
    assert await bench.commit(ticket, healthy) == "suspect"
    await bench.ledger.register("w1", "i2")
    assert await bench.commit(ticket, healthy) == "suspect"
    await bench.ledger.register("w2", "i2")
    assert isinstance(await bench.commit(ticket, healthy), Lease)


async def test_workers_that_die_of_a_request_say_so_when_they_come_back(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler:
        ticket = wire_ticket("poison")
        for number in (1, 2):
            async with fake_worker(scheduler, incarnation=f"i{number}") as worker:
                worker.accept(await lease_of(scheduler.place(ticket, lost_epoch=number - 1)))
                await until(lambda: _is_started(scheduler, "poison"))
            died_with = [("poison", number, 7), ("bystander", number, number)]
            async with fake_worker(scheduler, incarnation=f"i{number}b", died_with=died_with):
                pass
        error = await failure_of(scheduler.place(ticket, lost_epoch=2))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "QUARANTINED")
        told = scheduler.scheduler.metrics.registry.get_sample_value
        assert told("forebay_quarantined_total", {"model": "tiny@fp32", "latency_class": "standard"}) == 1


async def test_a_stream_that_waits_hears_of_it(redis_server) -> None:
    async with running_scheduler(redis_server.url, no_worker_seconds=30.0) as scheduler:
        async with fake_worker(scheduler) as worker:
            worker.accept(await lease_of(scheduler.place(wire_ticket("poison"))))
        failure = failure_of(scheduler.place(wire_ticket("poison"), lost_epoch=1, excluded_workers=["w1"]))
        ledger = scheduler.scheduler.ledger
        await ledger.died([("poison", 1, 7)])
        await ledger.died([("poison", 2, 7)])
        assert (await failure).reason == "QUARANTINED"


async def _is_started(scheduler: RunningScheduler, request_id: str) -> bool:
    return await scheduler.store.commands(["HGET", keys.ticket(request_id), "started"]) == ["1"]
