"""Schedulers, workers and Redis die, pause, forget and come back: nothing is lost and nothing runs twice."""

import asyncio
from collections import Counter

import grpc
import pytest

from forebay.v1 import scheduler_pb2, types_pb2
from services.common.errors import Code, unavailable
from services.scheduler import keys
from tests.scheduler_harness import (
    FakeWorker,
    RunningScheduler,
    failure_of,
    fake_worker,
    lease_of,
    queue_is,
    running_scheduler,
    until,
    wire_ticket,
)


async def _finish(scheduler: RunningScheduler, lease: scheduler_pb2.Lease) -> bool:
    request = scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, usage=types_pb2.Usage(), finish_reason=1)
    return bool((await scheduler.stub.Finish(request)).ended)


async def _leases(scheduler: RunningScheduler, number: int) -> bool:
    return (await scheduler.scheduler.ledger.survey()).num_leases == number


async def _fill(scheduler: RunningScheduler, worker: FakeWorker, number: int = 3) -> list[scheduler_pb2.Lease]:
    """Leases that take every slot of a worker of 1 slot."""
    leases = [await lease_of(scheduler.place(wire_ticket())) for _ in range(number)]
    for lease in leases:
        worker.accept(lease)
    return leases


async def test_two_schedulers_place_each_of_200_tickets_once(redis_server) -> None:
    """Case F21, and the race of DESIGN 8.2."""
    async with (
        running_scheduler(redis_server.url, "s1") as s1,
        running_scheduler(redis_server.url, "s2") as s2,
        fake_worker(s1, s2, worker_id="w1", slots=8, num_blocks=1000) as w1,
        fake_worker(s1, s2, worker_id="w2", slots=8, num_blocks=1000) as w2,
    ):
        workers, most, running = {"w1": w1, "w2": w2}, Counter[str](), Counter[str]()

        async def run(i: int) -> tuple[str, int]:
            ask, end = (s1, s2) if i % 2 else (s2, s1)
            lease = await lease_of(ask.place(wire_ticket(f"r{i}")))
            workers[lease.worker_id].accept(lease)
            running[lease.worker_id] += 1
            most[lease.worker_id] = max(most[lease.worker_id], running[lease.worker_id])
            await asyncio.sleep(0)
            running[lease.worker_id] -= 1
            del workers[lease.worker_id].leases[lease.request_id]
            assert await _finish(end, lease)
            return lease.request_id, lease.epoch

        ended = await asyncio.gather(*(run(i) for i in range(200)))
        assert sorted(ended) == sorted((f"r{i}", 1) for i in range(200))
        assert max(most.values()) <= 10
        placed = [s.scheduler.metrics.registry.get_sample_value("forebay_placements_total", _LINE) or 0 for s in (s1, s2)]
        assert sum(placed) == 200
        await until(lambda: _leases(s1, 0))


_LINE = {"model": "tiny@fp32", "latency_class": "standard"}


def _ended(scheduler: RunningScheduler, reason: str) -> float | None:
    return scheduler.scheduler.metrics.registry.get_sample_value("forebay_finished_total", {**_LINE, "reason": reason})


async def test_a_ticket_is_placed_by_another_scheduler_that_has_the_worker(redis_server) -> None:
    async with running_scheduler(redis_server.url, "s1") as s1, running_scheduler(redis_server.url, "s2") as s2:
        waiting = asyncio.create_task(lease_of(s1.place(wire_ticket())))
        await until(lambda: queue_is(s1, 1))
        async with fake_worker(s2):
            assert (await waiting).worker_id == "w1"
            assert (await lease_of(s1.place(wire_ticket()))).worker_id == "w1"


async def test_a_killed_scheduler_loses_nothing(redis_server) -> None:
    """Case F07: the tickets wait on at their old places; the gateways ask the other scheduler."""
    async with (
        running_scheduler(redis_server.url, "s1") as s1,
        running_scheduler(redis_server.url, "s2") as s2,
        fake_worker(s1, s2, slots=1) as worker,
    ):
        held = await _fill(s1, worker)
        tickets = [wire_ticket(name) for name in ("first", "second")]
        broken = []
        for i, ticket in enumerate(tickets, 1):
            broken.append(asyncio.create_task(failure_of(s1.place(ticket))))
            await until(lambda i=i: queue_is(s2, i))
        await s1.kill()
        assert {error.code for error in await asyncio.gather(*broken)} == {Code.UNAVAILABLE}
        # The later one asks first.
        again = {t.request_id: asyncio.create_task(lease_of(s2.place(t))) for t in reversed(tickets)}
        await until(lambda: len(s2.scheduler.waiting) == 2)
        await _end(s2, worker, held[0])
        first = await again["first"]
        worker.accept(first)
        assert first.epoch == 1
        assert not again["second"].done()
        await _end(s2, worker, held[1])
        assert (await again["second"]).epoch == 1


async def _end(scheduler: RunningScheduler, worker: FakeWorker, lease: scheduler_pb2.Lease) -> None:
    worker.leases.pop(lease.request_id)
    assert await _finish(scheduler, lease)


async def test_a_stream_that_never_returns_is_dropped(redis_server) -> None:
    async with running_scheduler(redis_server.url, "s1") as s1, running_scheduler(redis_server.url, "s2") as s2:
        lost = asyncio.create_task(failure_of(s1.place(wire_ticket("lost"))))
        await until(lambda: queue_is(s2, 1))
        await s1.kill()
        await lost
        await until(lambda: queue_is(s2, 0))
        await until(lambda: _ended(s2, "dropped") == 1)


async def test_a_stopping_scheduler_sends_its_callers_elsewhere(redis_server) -> None:
    async with running_scheduler(redis_server.url, "s1") as s1, running_scheduler(redis_server.url, "s2") as s2:
        sent_away = asyncio.create_task(failure_of(s1.place(wire_ticket("a"))))
        await until(lambda: queue_is(s2, 1))
        await s1.scheduler.stop()
        error = await sent_away
        assert (error.code, error.reason, error.retry_after_seconds) == (Code.UNAVAILABLE, "STOPPING", None)
        assert await queue_is(s2, 1), "not withdrawn"
        async with fake_worker(s2):
            assert (await lease_of(s2.place(wire_ticket("a")))).epoch == 1


async def test_a_refused_request_goes_back_to_its_old_place(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler, slots=1) as worker:
        held = await _fill(scheduler, worker, 2)
        ticket = wire_ticket("refused")
        lease = await lease_of(scheduler.place(ticket))
        behind = asyncio.create_task(lease_of(scheduler.place(wire_ticket("behind"))))
        await until(lambda: queue_is(scheduler, 1))
        again = await lease_of(scheduler.place(ticket, lost_epoch=lease.epoch))
        assert (again.request_id, again.epoch) == ("refused", 2)
        assert not behind.done()
        worker.accept(again)
        await _end(scheduler, worker, held[0])
        assert (await behind).epoch == 1
        assert not await _finish(scheduler, lease), "the first epoch is over"


async def test_a_lost_worker_is_left_and_its_late_words_are_refused(redis_server) -> None:
    """Case B38: 50 in flight move once each; the old worker resumes, lists them, and is told to stop."""
    async with (
        running_scheduler(redis_server.url) as scheduler,
        fake_worker(scheduler, worker_id="old", slots=60, num_blocks=500) as old,
    ):
        tickets = [wire_ticket(f"r{i}") for i in range(50)]
        leases = await asyncio.gather(*(lease_of(scheduler.place(ticket)) for ticket in tickets))
        for lease in leases:
            old.accept(lease)
        await until(lambda: len(old.leases) == 50)
        paused, old.leases = old.leases, {}
        await old.detach()
        async with fake_worker(scheduler, worker_id="new", slots=60, num_blocks=500) as new:
            moved = await asyncio.gather(*(lease_of(scheduler.place(t, lost_epoch=1, excluded_workers=["old"])) for t in tickets))
            assert {(lease.worker_id, lease.epoch) for lease in moved} == {("new", 2)}
            for lease in moved:
                new.accept(lease)
            old.leases = paused
            await old.attach(scheduler)
            await until(lambda: len(old.revoked) >= 50)
            assert set(old.revoked) == {(ticket.request_id, 1) for ticket in tickets}
            assert not any([await _finish(scheduler, lease) for lease in leases])
            assert new.revoked == []
            assert all([await _finish(scheduler, lease) for lease in moved])


async def test_a_lease_that_is_not_started_ends_and_its_room_is_free(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler, slots=1) as worker:
        for _ in range(3):
            await lease_of(scheduler.place(wire_ticket()))
        worker.accept(await lease_of(scheduler.place(wire_ticket("next"))))
        await until(lambda: _leases(scheduler, 1))
        await until(lambda: _ended(scheduler, "not started") == 3)


async def test_after_a_gateways_death_its_leases_expire(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler) as worker:
        lease = await lease_of(scheduler.place(wire_ticket()))
        worker.accept(lease)

        async def listed() -> bool:
            return await scheduler.store.commands(["HGET", keys.ticket(lease.request_id), "started"]) == ["1"]

        await until(listed)
        worker.leases.clear()
        await until(lambda: _leases(scheduler, 0))
        await until(lambda: _ended(scheduler, "expired") == 1)


async def test_a_restarted_worker_starts_empty(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler:
        async with fake_worker(scheduler, slots=1) as worker:
            leases = await _fill(scheduler, worker)
        async with fake_worker(scheduler, slots=1, incarnation="i2") as reborn:
            again = await lease_of(scheduler.place(wire_ticket(leases[0].request_id), lost_epoch=1))
            assert (again.incarnation, again.epoch) == ("i2", 2)
            reborn.accept(again)
            await _fill(scheduler, reborn, 2)


async def test_two_workers_of_one_name_are_told(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url, "s1") as s1,
        running_scheduler(redis_server.url, "s2") as s2,
        fake_worker(s1, incarnation="i1") as first,
        fake_worker(s2, incarnation="i2"),
    ):
        await until(lambda: first.last_error is not None)
        assert first.last_error is not None
        assert first.last_error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "FOREBAY_WORKER_ID" in (first.last_error.details() or "")


async def test_losing_the_stream_marks_a_worker_down_for_all(redis_server) -> None:
    def flag(name: str) -> bytes:
        return redis_server.command("HGET", keys.worker("w1"), name)

    async with running_scheduler(redis_server.url, "s1") as s1, running_scheduler(redis_server.url, "s2", no_worker_seconds=30) as s2:
        frozen = FakeWorker("w1", "i1", beat_seconds=3600)  # Attached to this one too, and silent there after its first heartbeat.
        await frozen.attach(s2)
        await until(lambda: flag("slots:1") == b"$1\r\n0\r\n")
        async with fake_worker(s1, beat_seconds=0.05) as near:
            await near.detach()
        await until(lambda: flag("down") == b"$1\r\n1\r\n")
        assert (await failure_of(s2.place(wire_ticket(deadline_seconds=0.5)))).code is Code.DEADLINE_EXCEEDED
        await frozen.detach()


async def test_a_silent_worker_takes_no_new_work(redis_server) -> None:
    async with running_scheduler(redis_server.url, liveness_seconds=0.3) as scheduler:
        silent = await FakeWorker(beat_seconds=3600).attach(scheduler)
        await until(lambda: not scheduler.scheduler.registry.usable(asyncio.get_running_loop().time()))
        assert (await failure_of(scheduler.place(wire_ticket(deadline_seconds=10)))).reason == "NO_WORKER"
        await silent.detach()


@pytest.mark.parametrize("how", ["flush", "restart"])
async def test_redis_forgets_everything(redis_server, how: str) -> None:
    """Cases F10 and B37: running streams go on, waiting ones keep their order, all without a hand."""
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler, slots=1) as worker:
        held = await _fill(scheduler, worker)
        calls = {}
        for i, name in enumerate(("first", "second"), 1):
            calls[name] = asyncio.create_task(lease_of(scheduler.place(wire_ticket(name))))
            await until(lambda i=i: queue_is(scheduler, i))
        if how == "flush":
            redis_server.command("FLUSHALL")
        else:
            redis_server.kill()
            await until(lambda: scheduler.store.is_away)
            assert scheduler.scheduler.not_ready_reason() == "Redis is away"
            error = await failure_of(scheduler.place(wire_ticket()))
            assert (error.code, error.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
            assert error.retry_after_seconds
            redis_server.start()
        await until(lambda: scheduler.store.is_away is False and _both(scheduler))
        assert worker.revoked == []
        await _end(scheduler, worker, held[0])
        worker.accept(await calls["first"])
        assert not calls["second"].done()
        await _end(scheduler, worker, held[1])
        assert (await calls["second"]).epoch == 1
        assert worker.revoked == []


async def _both(scheduler: RunningScheduler) -> bool:
    return await queue_is(scheduler, 2) and await _leases(scheduler, 3)


async def test_an_outage_of_a_redis_that_remembers(persistent_redis_server) -> None:
    """Case F10 with an append-only file, longer than every term: nothing expires that is alive."""
    async with running_scheduler(persistent_redis_server.url) as scheduler, fake_worker(scheduler, slots=1) as worker:
        held = await _fill(scheduler, worker)
        call = asyncio.create_task(lease_of(scheduler.place(wire_ticket("waits"))))
        await until(lambda: queue_is(scheduler, 1))
        persistent_redis_server.kill()
        failures = scheduler.store.num_failures
        await until(lambda: scheduler.store.num_failures > failures + 4)
        assert (scheduler.scheduler.metrics.registry.get_sample_value("forebay_redis_failures_total") or 0) > failures + 4
        persistent_redis_server.start()
        await _eventually_end(scheduler, worker, held[0])
        assert (await call).epoch == 1
        assert worker.revoked == []


async def _eventually_end(scheduler: RunningScheduler, worker: FakeWorker, lease: scheduler_pb2.Lease) -> None:
    worker.leases.pop(lease.request_id)

    async def ended() -> bool:
        try:
            return await _finish(scheduler, lease)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    await until(ended)


async def test_a_frozen_redis_is_refused_within_a_second_and_waiting_streams_stay(redis_server) -> None:
    """Case F12."""
    async with running_scheduler(redis_server.url, redis_timeout=0.2) as scheduler, fake_worker(scheduler, slots=1) as worker:
        held = await _fill(scheduler, worker)
        waits = asyncio.create_task(lease_of(scheduler.place(wire_ticket())))
        await until(lambda: queue_is(scheduler, 1))
        redis_server.pause()
        try:
            started = asyncio.get_running_loop().time()
            errors = await asyncio.gather(*(failure_of(scheduler.place(wire_ticket())) for _ in range(30)))
            assert asyncio.get_running_loop().time() - started < 1
            assert {error.reason for error in errors} == {"STORE_UNAVAILABLE"}
            assert not waits.done()
        finally:
            redis_server.resume()
        await _eventually_end(scheduler, worker, held[0])
        assert (await waits).epoch == 1


async def test_a_scheduler_whose_loop_dies_ends_instead_of_living_half(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler:
        ending = asyncio.create_task(scheduler.scheduler.run_until(asyncio.Event()))

        async def heard() -> bool:
            return await scheduler.store.commands(["PUBLISH", keys.EVENTS, '"no event"']) == [1]

        await until(heard)
        with pytest.raises(AttributeError):
            await ending


async def test_two_schedulers_of_one_name_still_hear_each_other(redis_server) -> None:
    """And one that was restarted under its name doesn't take its predecessor's streams for its own."""
    async with running_scheduler(redis_server.url, "same") as s1, running_scheduler(redis_server.url, "same", poll_seconds=30) as s2:
        assert s1.scheduler.new_holder() != s2.scheduler.new_holder()
        async with fake_worker(s2, beat_seconds=0.2, slots=1):
            for _ in range(2):
                assert (await lease_of(s1.place(wire_ticket()))).worker_id == "w1"


async def test_who_has_a_place_hears_so_although_redis_has_gone(redis_server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its gateway would take the scheduler for silent and give it up."""
    async with running_scheduler(redis_server.url, no_worker_seconds=30.0) as scheduler:

        async def fails() -> None:
            raise unavailable("Redis is away")

        monkeypatch.setattr(scheduler.scheduler.keeper, "_tell_positions", fails)
        call = scheduler.place(wire_ticket())
        first = await call.read()
        assert (first.queued.position, first.queued.eta_seconds) == (0, -1)
        call.cancel()
