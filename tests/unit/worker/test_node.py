"""Attached to every scheduler, for ever; heartbeats tell what the worker has."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from forebay.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common import rpc
from services.worker.node import Beat, Node
from tests.worker_harness import continuation, hear, serving, until

FAST = Beat(heartbeat_seconds=0.03, first_retry_seconds=0.01, last_retry_seconds=0.02)
RARE = Beat(heartbeat_seconds=60, first_retry_seconds=0.01, last_retry_seconds=0.02)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Hears a worker, and tells it what the test wants."""

    def __init__(self) -> None:
        self.registers: list[scheduler_pb2.Register] = []
        self.heartbeats: list[scheduler_pb2.Heartbeat] = []
        self.commands: asyncio.Queue[scheduler_pb2.AttachResponse] = asyncio.Queue()
        self.address = "127.0.0.1:0"

    async def __aenter__(self) -> "FakeScheduler":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; again on the same port after a stop."""
        self._server = rpc.server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{rpc.bind(self._server, self.address)}"
        await self._server.start()

    async def stop(self) -> None:
        """Dies."""
        await self._server.stop(None)

    async def Attach(
        self, requests: AsyncIterator[scheduler_pb2.AttachRequest], context: object
    ) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """Registers, then listens beside sending commands."""
        first = await anext(requests)
        self.registers.append(first.register)
        yield scheduler_pb2.AttachResponse(registered=scheduler_pb2.Registered(scheduler_id="s"))

        async def listen() -> None:
            async for request in requests:
                self.heartbeats.append(request.heartbeat)

        listening = asyncio.create_task(listen())
        try:
            while True:
                yield await self.commands.get()
        finally:
            listening.cancel()


async def test_a_worker_introduces_itself_to_every_scheduler() -> None:
    async with FakeScheduler() as one, FakeScheduler() as two, serving(schedulers=f"{one.address}, {two.address}", beat=FAST) as worker:
        await until(lambda: worker.worker.node.num_attached == 2)
        assert worker.worker.why_not_ready() is None
        for scheduler in (one, two):
            [register] = scheduler.registers
            assert (register.worker_id, register.incarnation) == ("w1", worker.worker.incarnation)
            assert register.address == worker.worker.address
            assert (register.max_sequences, register.max_waiting) == (8, 2)
            [model] = register.models
            assert (model.model, model.version, model.block_size, model.num_blocks, model.loaded) == (
                "toy@fp32",
                "0123456789abcdef",
                4,
                64,
                True,
            )
            assert (model.max_model_len, model.fingerprint) == (256, "toy")
            await until(lambda scheduler=scheduler: len(scheduler.heartbeats) >= 3)
            numbers = [heartbeat.sequence_number for heartbeat in scheduler.heartbeats]
            assert numbers == sorted(set(numbers))
            assert scheduler.heartbeats[-1].healthy
            assert scheduler.heartbeats[-1].memory_total_bytes > scheduler.heartbeats[-1].memory_used_bytes > 0


async def test_heartbeats_list_every_lease_with_its_progress() -> None:
    async with FakeScheduler() as scheduler, serving(schedulers=scheduler.address, beat=FAST) as worker:
        worker.runner.hold_at_output(5)
        call = worker.stub.Generate(worker.request("r1", epoch=4, max_tokens=100))
        await call.read()
        await until(
            lambda: scheduler.heartbeats and scheduler.heartbeats[-1].leases and scheduler.heartbeats[-1].leases[0].num_output_tokens == 5
        )
        [lease] = scheduler.heartbeats[-1].leases
        assert (lease.request_id, lease.epoch, lease.num_blocks) == ("r1", 4, 2)
        assert scheduler.heartbeats[-1].num_running == 1
        assert scheduler.heartbeats[-1].num_used_blocks == 2
        [usage] = scheduler.heartbeats[-1].class_usage
        assert (usage.latency_class, usage.num_slots, usage.num_blocks) == (types_pb2.LATENCY_CLASS_STANDARD, 1, 2)
        assert list(scheduler.heartbeats[-1].loaded_models) == ["toy@fp32"]
        worker.runner.release()
        await hear(call)
        await until(lambda: not scheduler.heartbeats[-1].leases)


async def test_room_is_told_at_once() -> None:
    async with FakeScheduler() as scheduler, serving(schedulers=scheduler.address, beat=RARE) as worker:
        worker.runner.hold_at_output(3)
        call = worker.stub.Generate(worker.request())
        await until(lambda: worker.worker.loop.last_turn.stats[worker.served.model].num_used_blocks)
        worker.worker.node.nudge()
        await until(lambda: scheduler.heartbeats and scheduler.heartbeats[-1].num_used_blocks)
        worker.runner.release()
        await hear(call)
        await until(lambda: not scheduler.heartbeats[-1].leases and not scheduler.heartbeats[-1].num_used_blocks)


async def test_a_revoke_comes_through() -> None:
    async with FakeScheduler() as scheduler, serving(schedulers=scheduler.address, beat=FAST) as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request())
        await call.read()
        await until(lambda: worker.worker.node.num_attached)
        revoke = scheduler_pb2.Revoke(leases=[scheduler_pb2.LeaseProgress(request_id="r", epoch=1)])
        scheduler.commands.put_nowait(scheduler_pb2.AttachResponse(revoke=revoke))
        await until(lambda: not len(worker.worker.leases))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        worker.runner.release()


async def test_a_restarted_scheduler_is_found_again_while_streams_go_on() -> None:
    async with FakeScheduler() as scheduler, serving(schedulers=scheduler.address, beat=FAST) as worker:
        await until(lambda: worker.worker.node.num_attached == 1)
        worker.runner.hold_at_output(3)
        call = worker.stub.Generate(worker.request())
        await call.read()
        await scheduler.stop()
        await until(lambda: worker.worker.node.num_attached == 0)
        assert worker.worker.why_not_ready() == "no scheduler has been reached"
        await scheduler.start()
        await until(lambda: worker.worker.node.num_attached == 1)
        assert [register.incarnation for register in scheduler.registers] == [worker.worker.incarnation] * 2
        heard = len(scheduler.heartbeats)
        await until(lambda: len(scheduler.heartbeats) > heard)
        assert [lease.request_id for lease in scheduler.heartbeats[-1].leases] == ["r"]
        worker.runner.release()
        assert (await hear(call)).tokens() == continuation([1, 2, 3], 8)


async def test_an_operator_takes_it_out_of_service_and_back() -> None:
    async with FakeScheduler() as scheduler, serving(schedulers=scheduler.address, beat=FAST) as worker:
        for drained in (True, False, True):
            for _ in range(2):  # as from two schedulers
                scheduler.commands.put_nowait(scheduler_pb2.AttachResponse(drain=scheduler_pb2.Drain(drain=drained)))
            await until(lambda: scheduler.heartbeats and scheduler.heartbeats[-1].drained == drained)  # noqa: B023  # awaited here
            await until(lambda: scheduler.heartbeats[-1].draining == drained)  # noqa: B023
            assert worker.worker.why_not_ready() == ("draining" if drained else None)


@pytest.mark.parametrize("where", ["heartbeat", "revoke"])
async def test_an_error_of_ours_costs_one_stream_and_not_the_worker(where: str) -> None:
    failures = [OSError("no sensor")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    def heartbeat() -> scheduler_pb2.Heartbeat:
        if where == "heartbeat":
            fail_once()
        return scheduler_pb2.Heartbeat()

    async with FakeScheduler() as scheduler:
        scheduler.commands.put_nowait(scheduler_pb2.AttachResponse(revoke=scheduler_pb2.Revoke()))
        node = Node([scheduler.address], scheduler_pb2.Register(), heartbeat, lambda _: fail_once(), lambda _: None, beat=FAST)
        node.start()
        try:
            await until(lambda: not failures)
            heard = len(scheduler.heartbeats)
            await until(lambda: len(scheduler.heartbeats) > heard + 2)  # one may have been on its way
            assert node.num_attached == 1
        finally:
            await node.stop()
    assert node.num_attached == 0


class ForgetfulCall:
    """An Attach call that ends in the moment of its cancellation, as gRPC's do: the error comes out, the cancellation doesn't."""

    def __init__(self, waiting: asyncio.Event) -> None:
        self._waiting = waiting

    async def __aiter__(self) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        self._waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()) from None
        yield scheduler_pb2.AttachResponse()

    def cancel(self) -> None:
        pass


async def test_it_stops_although_its_call_fails_in_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    class Stub:
        def __init__(self, _: object) -> None:
            pass

        def Attach(self, _: object) -> ForgetfulCall:
            return ForgetfulCall(waiting)

    monkeypatch.setattr(scheduler_pb2_grpc, "SchedulerServiceStub", Stub)
    node = Node(["127.0.0.1:1"], scheduler_pb2.Register(), scheduler_pb2.Heartbeat, lambda _: None, lambda _: None, beat=FAST)
    node.start()
    await asyncio.wait_for(waiting.wait(), 5)
    await asyncio.wait_for(node.stop(), 5)
