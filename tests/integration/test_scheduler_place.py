"""One scheduler over gRPC: tickets are placed, finished, refused, withdrawn, and their callers told."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, from_rpc
from services.policy.watched import PolicyFile
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


@pytest.fixture
async def scheduler(redis_server):
    async with running_scheduler(redis_server.url) as running:
        yield running


async def _finish(scheduler: RunningScheduler, lease: scheduler_pb2.Lease) -> bool:
    usage = types_pb2.Usage(completion_tokens=3)
    request = scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, usage=usage, finish_reason=1)
    return (await scheduler.stub.Finish(request)).ended


async def _is_idle(scheduler: RunningScheduler) -> bool:
    survey = await scheduler.scheduler.ledger.survey()
    return not survey.queues and survey.num_leases == 0 and len(scheduler.scheduler.waiting) == 0


def _sample(scheduler: RunningScheduler, name: str, **labels: str) -> float | None:
    return scheduler.scheduler.metrics.registry.get_sample_value(name, labels)


async def test_place_and_finish(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler) as worker:
        ticket = wire_ticket("a")
        lease = await lease_of(scheduler.place(ticket))
        assert (lease.request_id, lease.epoch, lease.worker_id, lease.incarnation, lease.address) == ("a", 1, "w1", "i1", "w1:1")
        worker.accept(lease)
        assert await lease_of(scheduler.place(ticket)) == lease, "idempotent by request id"
        assert await _finish(scheduler, lease)
        assert not await _finish(scheduler, lease)
        assert (await failure_of(scheduler.place(ticket))).code is Code.ALREADY_EXISTS
        await until(lambda: ("a", 1) in worker.revoked)
        line = {"model": "tiny@fp32", "latency_class": "standard"}
        assert _sample(scheduler, "forebay_placements_total", **line) == 1
        assert _sample(scheduler, "forebay_finished_total", **line, reason="stop") == 1
        await until(lambda: _is_idle(scheduler))


async def test_a_full_worker_is_waited_for_and_callers_see_their_position(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler, slots=1) as worker:
        for i in range(3):  # One runs, two may wait on the worker.
            worker.accept(await lease_of(scheduler.place(wire_ticket(f"r{i}"))))
        calls = [scheduler.place(wire_ticket(name)) for name in ("first", "second")]
        seen: list[list[int]] = [[], []]

        async def follow(i: int) -> scheduler_pb2.Lease:
            async for response in calls[i]:
                if response.HasField("placed"):
                    return response.placed
                seen[i].append(response.queued.position)
            raise AssertionError

        first, second = asyncio.create_task(follow(0)), asyncio.create_task(follow(1))
        await until(lambda: sorted(positions[-1] for positions in seen if positions) == [0, 1])
        for request_id in ("r0", "r1"):
            worker.leases.pop(request_id)
            await _finish(scheduler, scheduler_pb2.Lease(request_id=request_id, epoch=1))
        assert {(await first).request_id, (await second).request_id} == {"first", "second"}


async def test_realtime_goes_to_a_worker_that_is_full_of_less_urgent_work(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler, slots=1) as worker:
        for i in range(3):
            worker.accept(await lease_of(scheduler.place(wire_ticket(f"b{i}", latency_class=3))))
        batch = asyncio.create_task(lease_of(scheduler.place(wire_ticket("batch", latency_class=3))))
        await until(lambda: queue_is(scheduler, 1))
        lease = await lease_of(scheduler.place(wire_ticket("now", latency_class=1)))
        assert (lease.worker_id, lease.ttft_target_seconds, lease.tpot_target_seconds) == ("w1", 0.2, 0.05)
        assert not batch.done()
        batch.cancel()


async def test_realtime_overtakes_what_waits(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler, slots=1) as worker:
        await _finish(scheduler, await lease_of(scheduler.place(wire_ticket(latency_class=3))))  # Batch has had its floor share.
        for i in range(3):
            worker.accept(await lease_of(scheduler.place(wire_ticket(f"r{i}", latency_class=1))))
        batch = asyncio.create_task(lease_of(scheduler.place(wire_ticket("batch", latency_class=3))))
        await until(lambda: queue_is(scheduler, 1))
        realtime = asyncio.create_task(lease_of(scheduler.place(wire_ticket("realtime", latency_class=1))))
        await until(lambda: queue_is(scheduler, 2))
        worker.leases.pop("r0")
        assert await _finish(scheduler, scheduler_pb2.Lease(request_id="r0", epoch=1))
        worker.accept(await realtime)
        assert not batch.done()
        batch.cancel()


async def test_dropping_the_stream_withdraws_at_once(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler, slots=1) as worker:
        for i in range(3):
            worker.accept(await lease_of(scheduler.place(wire_ticket(f"r{i}"))))
        call = scheduler.place(wire_ticket("gone"))
        await until(lambda: queue_is(scheduler, 1))
        call.cancel()
        await until(lambda: queue_is(scheduler, 0), seconds=4)  # not by the sweep, which takes 5 s
        assert len(scheduler.scheduler.waiting) == 0


async def test_cancels_at_every_moment_leave_nothing(scheduler: RunningScheduler) -> None:
    """Case B40."""
    async with fake_worker(scheduler, slots=2) as worker:
        worker.accept(await lease_of(scheduler.place(wire_ticket("other"))))

        async def cancelled(i: int) -> None:
            call = scheduler.place(wire_ticket(f"r{i}"))
            reading = asyncio.create_task(lease_of(call))
            await asyncio.wait([reading], timeout=(i % 25) / 1000)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        for batch in range(0, 300, 30):
            await asyncio.gather(*(cancelled(i) for i in range(batch, batch + 30)))
        del worker.leases["other"]
        await _finish(scheduler, scheduler_pb2.Lease(request_id="other", epoch=1))
        await until(lambda: _is_idle(scheduler))
        await until(lambda: scheduler.store.num_in_use == 0)


@pytest.mark.parametrize("how", ["ticket", "call", "past"])
async def test_a_deadline_in_the_queue(scheduler: RunningScheduler, how: str) -> None:
    async with fake_worker(scheduler, slots=1) as worker:
        for i in range(3):
            worker.accept(await lease_of(scheduler.place(wire_ticket(f"r{i}"))))
        seconds = {"ticket": 0.2, "call": 30.0, "past": -1.0}[how]
        request = scheduler_pb2.PlaceRequest(ticket=wire_ticket("late", deadline_seconds=seconds))
        error = await failure_of(scheduler.stub.Place(request, timeout=0.2 if how == "call" else None))
        assert error.code is Code.DEADLINE_EXCEEDED
        await until(lambda: queue_is(scheduler, 0))


async def test_what_no_worker_could_hold_is_refused_and_small_ones_run(scheduler: RunningScheduler) -> None:
    """Case B23."""
    async with fake_worker(scheduler, slots=30, num_blocks=64):
        big = asyncio.create_task(failure_of(scheduler.place(wire_ticket("big", num_prompt_tokens=80 * 16, max_tokens=1))))
        small = await asyncio.gather(*(lease_of(scheduler.place(wire_ticket(max_tokens=1))) for _ in range(20)))
        assert len({lease.request_id for lease in small}) == 20
        error = await big
        assert error.code is Code.INVALID_ARGUMENT
        assert error.violations[0].field == "prompt"
        assert all(number in error.message for number in ("1280", "1024"))
        long = await failure_of(scheduler.place(wire_ticket(num_prompt_tokens=100, max_tokens=4000)))
        assert (long.code, long.violations[0].field) == (Code.INVALID_ARGUMENT, "max_tokens")
        assert all(number in long.message for number in ("1024", "924"))


async def test_prompts_that_begin_alike_go_to_the_same_worker(scheduler: RunningScheduler) -> None:
    """Each of eight beginnings comes six times, in turn; by load alone an idle fleet would send all to the first worker."""

    def ticket(beginning: int) -> scheduler_pb2.Ticket:
        hashes = [bytes([beginning, index]) * 4 for index in range(4)]
        return wire_ticket(num_prompt_tokens=300, block_hashes=hashes, hash_tokens=64)

    async with fake_worker(scheduler, worker_id="w1", slots=20, num_blocks=512) as one:
        async with fake_worker(scheduler, worker_id="w2", incarnation="i2", slots=20, num_blocks=512):
            held = [await lease_of(scheduler.place(ticket(beginning))) for beginning in range(8)]
            homes = [lease.worker_id for lease in held]
            assert set(homes) == {"w1", "w2"}, "while they run, load spreads them"
            for lease in held:
                await _finish(scheduler, lease)
            for _ in range(5):
                for beginning, home in enumerate(homes):
                    lease = await lease_of(scheduler.place(ticket(beginning)))
                    assert lease.worker_id == home
                    await _finish(scheduler, lease)
        await until(lambda: len(scheduler.scheduler.registry.usable(time.monotonic())) == 1)
        lease = await lease_of(scheduler.place(ticket(homes.index("w2"))))
        assert lease.worker_id == one.register.worker_id, "better without the beginning than not at all"


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"request_id": "x" * 257}, "ticket.request_id"),
        ({"org": ""}, "ticket.org"),
        ({"latency_class": 0}, "ticket.latency_class"),
        ({"num_prompt_tokens": 0}, "ticket.num_prompt_tokens"),
        ({"max_tokens": -1}, "ticket.max_tokens"),
        ({"n": 0}, "ticket.n"),
        ({"block_hashes": [b"12345678"] * 257, "hash_tokens": 16, "num_prompt_tokens": 9999}, "ticket.block_hashes"),
        ({"block_hashes": [b"1234567"], "hash_tokens": 16}, "ticket.block_hashes"),
        ({"block_hashes": [b"12345678"] * 2, "hash_tokens": 16}, "ticket.block_hashes"),
        ({"block_hashes": [b"12345678"], "hash_tokens": 0}, "ticket.hash_tokens"),
        ({"block_hashes": [b"12345678"], "hash_tokens": 4097}, "ticket.hash_tokens"),
    ],
)
async def test_tickets_that_make_no_sense_are_refused(scheduler: RunningScheduler, fields: dict[str, object], blamed: str) -> None:
    error = await failure_of(scheduler.place(wire_ticket(**fields)))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, blamed)


async def test_no_worker_for_the_model(scheduler: RunningScheduler) -> None:
    started = asyncio.get_running_loop().time()
    error = await failure_of(scheduler.place(wire_ticket()))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_WORKER")
    assert error.retry_after_seconds
    assert asyncio.get_running_loop().time() - started > 0.2, "a scheduler that has just started waits for workers"
    again = await failure_of(scheduler.place(wire_ticket()))
    assert again.reason == "NO_WORKER"
    async with fake_worker(scheduler):
        assert (await lease_of(scheduler.place(wire_ticket()))).worker_id == "w1"
        other = await failure_of(scheduler.place(wire_ticket(model_version="v2")))
        assert "version v2" in other.message
    gone = await failure_of(scheduler.place(wire_ticket()))
    assert gone.reason == "NO_WORKER"
    await until(lambda: queue_is(scheduler, 0))


async def test_whom_no_worker_could_hold_any_more_leaves_the_queue(redis_server, tmp_path: Path) -> None:
    """It stands first in its org's queue: behind it nobody would have a turn."""
    path = tmp_path / "policy.yaml"
    path.write_text("orgs: {acme: {kv_share: 1.0}}\n")
    async with running_scheduler(redis_server.url, policy=PolicyFile(path)) as scheduler, fake_worker(scheduler, slots=1) as worker:
        for _ in range(3):
            worker.accept(await lease_of(scheduler.place(wire_ticket())))
        waits = asyncio.create_task(failure_of(scheduler.place(wire_ticket(num_prompt_tokens=200))))
        await until(lambda: queue_is(scheduler, 1))
        path.write_text("orgs: {acme: {kv_share: 0.1}}\n")
        error = await waits
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_WORKER")
        assert "the org's share (0.1)" in error.message
        await until(lambda: queue_is(scheduler, 0))


async def test_a_full_queue_says_when_to_come_back(redis_server) -> None:
    async with running_scheduler(redis_server.url, max_queued=2) as scheduler, fake_worker(scheduler, slots=1) as worker:
        for i in range(3):
            worker.accept(await lease_of(scheduler.place(wire_ticket(f"r{i}"))))
        waiting = [asyncio.create_task(lease_of(scheduler.place(wire_ticket()))) for _ in range(2)]
        await until(lambda: queue_is(scheduler, 2))
        error = await failure_of(scheduler.place(wire_ticket()))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "QUEUE_FULL")
        assert error.retry_after_seconds
        for call in waiting:
            call.cancel()


async def test_a_newer_stream_of_the_same_request_takes_over(scheduler: RunningScheduler) -> None:
    older = asyncio.create_task(failure_of(scheduler.place(wire_ticket("a"))))
    await until(lambda: queue_is(scheduler, 1))
    newer = asyncio.create_task(lease_of(scheduler.place(wire_ticket("a"))))
    assert (await older).code is Code.ABORTED
    async with fake_worker(scheduler):
        assert (await newer).epoch == 1


async def test_the_fleet_as_operators_see_it(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler, worker_id="w1", slots=1) as busy, fake_worker(scheduler, worker_id="w2") as leaving:
        leaving.state.draining = True
        await until(lambda: scheduler.scheduler.registry.ready_by_model(asyncio.get_running_loop().time())["tiny@fp32"] == 1)
        for i in range(3):
            busy.accept(await lease_of(scheduler.place(wire_ticket(f"r{i}", latency_class=1))))
        busy.state.class_usage.add(latency_class=1, num_slots=3, num_blocks=6)
        waits = asyncio.create_task(lease_of(scheduler.place(wire_ticket(latency_class=1))))

        async def queued() -> bool:
            fleet = await scheduler.admin.GetFleet(admin_pb2.GetFleetRequest())
            waiting = [queue.latency_class for queue in fleet.queues]  # the last one placed may still be counted for a moment
            return waiting == [1] and bool(fleet.workers[0].heartbeat.class_usage)

        await until(queued)
        fleet = await scheduler.admin.GetFleet(admin_pb2.GetFleetRequest())
        assert fleet.scheduler_id == "s1"
        [usage] = fleet.workers[0].heartbeat.class_usage
        assert (usage.latency_class, usage.num_slots, usage.num_blocks) == (1, 3, 6)
        states = [(worker.registration.worker_id, worker.ready, worker.not_ready_reason) for worker in fleet.workers]
        assert states == [("w1", True, ""), ("w2", False, "draining")]
        assert all(worker.heartbeat_age_seconds < 5 for worker in fleet.workers)
        (queue,) = fleet.queues
        assert (queue.model, queue.latency_class, queue.num_waiting) == ("tiny@fp32", 1, 1)
        waits.cancel()
    await until(lambda: scheduler.scheduler.registry.states(0)[0].not_ready_reason.startswith("its stream ended"))


async def test_an_operator_sees_its_connections(scheduler: RunningScheduler) -> None:
    servers = await channelz_pb2_grpc.ChannelzStub(scheduler.channel).GetServers(channelz_pb2.GetServersRequest())
    assert any(server.data.calls_started for server in servers.server)


async def test_attach_streams_that_are_none(scheduler: RunningScheduler) -> None:
    """An empty Attach stream, and one that begins wrong."""

    async def nothing():
        return
        yield

    async def heartbeat_first():
        yield scheduler_pb2.AttachRequest(heartbeat=scheduler_pb2.Heartbeat())

    assert [response async for response in scheduler.stub.Attach(nothing())] == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in scheduler.stub.Attach(heartbeat_first()):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_that_promises_more_than_its_cache_holds_is_refused(scheduler: RunningScheduler) -> None:
    register = FakeWorker(num_blocks=64).register
    register.models[0].max_model_len = 1025
    call = scheduler.stub.Attach(iter([scheduler_pb2.AttachRequest(register=register)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc(caught.value)
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "register.models")
    assert all(number in error.message for number in ("1025", "64", "16"))
