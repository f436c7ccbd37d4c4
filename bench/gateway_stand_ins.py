"""What a measured gateway talks to, as one process: a scheduler that places at once, and a worker whose engine is a clock.

The worker's service, leases and outboxes are the real ones. When as many requests are open
as there will be, it says so; from SIGUSR1 on each step brings every one of them a token, which goes out at once.
"""

import asyncio
import signal
import sys
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from bench.chaos.runner import VOCAB_SIZE
from forebay.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2_grpc
from services.common import process, rpc
from services.worker.engine.request import EngineRequest, FinishReason, TokenOutput
from services.worker.engine_loop import Sink
from services.worker.leases import Leases
from services.worker.metrics import WorkerMetrics
from services.worker.outbox import Pace
from services.worker.server import WorkerService
from services.worker.throughput import Throughput
from services.worker.wire import Served

MODEL = "bench"
INCARNATION = "1"
SERVED = Served(f"{MODEL}@fp32", "b" * 16, "bench", VOCAB_SIZE, block_size=16, num_blocks=1 << 20, max_model_len=4096)
NUM_LETTERS = 94  # the first ids: printable ASCII


class ClockLoop:
    """Stands for an EngineLoop."""

    healthy = True

    def __init__(self, num_streams: int, step_seconds: float) -> None:
        self._num_streams = num_streams
        self._step_seconds = step_seconds
        self._open: dict[str, tuple[EngineRequest, Sink]] = {}
        self.started = asyncio.Event()
        self.last_turn = SimpleNamespace(stats={SERVED.model: SimpleNamespace(num_blocks=1 << 20, num_used_blocks=0)}, progress={})

    def add(self, request: EngineRequest, sink: Sink) -> None:
        """Runs it from the next step on."""
        self._open[request.request_id] = request, sink
        self.last_turn.progress[request.request_id] = (0, 1)
        if len(self._open) == self._num_streams:
            process.announce("full")

    def abort(self, request_id: str) -> None:
        """It is over."""
        self._open.pop(request_id, None)
        self.last_turn.progress.pop(request_id, None)

    async def run(self) -> None:
        """Round by round."""
        while True:
            await self.started.wait()
            self.started.clear()
            await self._round()

    async def _round(self) -> None:
        """Steps until all have ended; what is late is made up for."""
        loop, position = asyncio.get_running_loop(), 0
        began = loop.time()
        process.announce("stepping", at=began, seconds=self._step_seconds)
        while self._open:
            for request_id, (request, sink) in list(self._open.items()):
                is_last = position + 1 == request.sampling.max_tokens
                output = TokenOutput(request_id, 0, position, [(7 * position + (request.sampling.seed or 0)) % NUM_LETTERS])
                if is_last:
                    del self._open[request_id]
                    output.finish_reason = FinishReason.LENGTH
                sink.push(output)
            position += 1
            await asyncio.sleep(max(0.0, began + position * self._step_seconds - loop.time()))


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Everything goes to the one worker."""

    def __init__(self) -> None:
        self.address = ""

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Any) -> None:  # type: ignore[override]  # it writes
        """Answers as schedulers do."""
        await context.write(scheduler_pb2.PlaceResponse(queued=scheduler_pb2.Queued(position=0, eta_seconds=-1)))
        lease = scheduler_pb2.Lease(
            request_id=request.ticket.request_id, epoch=1, worker_id="w1", incarnation=INCARNATION, address=self.address
        )
        await context.write(scheduler_pb2.PlaceResponse(placed=lease))

    async def Finish(self, _: scheduler_pb2.FinishRequest, __: Any) -> scheduler_pb2.FinishResponse:
        """Takes note of nothing."""
        return scheduler_pb2.FinishResponse(ended=True)

    async def GetOrg(self, request: scheduler_pb2.GetOrgRequest, _: Any) -> scheduler_pb2.GetOrgResponse:
        """An org without limits."""
        return scheduler_pb2.GetOrgResponse(policy=types_pb2.OrgPolicy(org=request.org))

    async def GetFleet(self, _: admin_pb2.GetFleetRequest, __: Any) -> admin_pb2.GetFleetResponse:
        """The one worker."""
        model = scheduler_pb2.WorkerModel(
            model=SERVED.model, version=SERVED.version, block_size=SERVED.block_size, num_blocks=SERVED.num_blocks,
            max_model_len=SERVED.max_model_len, loaded=True, fingerprint=SERVED.fingerprint,
        )  # fmt: skip
        registration = scheduler_pb2.Register(worker_id="w1", incarnation=INCARNATION, address=self.address, models=[model])
        worker = admin_pb2.WorkerState(registration=registration, heartbeat=scheduler_pb2.Heartbeat(healthy=True), ready=True)
        return admin_pb2.GetFleetResponse(workers=[worker], scheduler_id="s1")


async def serve(stop: asyncio.Event, num_streams: int, step_seconds: float) -> None:
    """Until SIGTERM."""
    engine, server, scheduler = ClockLoop(num_streams, step_seconds), rpc.server(), Scheduler()  # type: ignore[abstract]  # the rest is never called
    throughput = Throughput(num_blocks=SERVED.num_blocks, block_size=SERVED.block_size, max_sequences=4096)
    metrics = WorkerMetrics(CollectorRegistry(), {SERVED.model: throughput}, max_model_len=SERVED.max_model_len)
    pace = Pace(delta_seconds=0.0, share_seconds=0.0)
    leases = Leases(cast("Any", engine), metrics.models, max_sequences=4096, pace=pace)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(leases, {SERVED.model: SERVED}, INCARNATION, pace=pace), server)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(scheduler, server)
    scheduler.address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
    await server.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.started.set)
    process.announce("listening", address=scheduler.address)
    steps = asyncio.create_task(engine.run())
    await process.until(stop, steps)
    await server.stop(0)


if __name__ == "__main__":
    process.run(lambda stop: serve(stop, int(sys.argv[1]), float(sys.argv[2])))
