"""How long Place takes at a fixed rate: a real scheduler process on a real Valkey, workers that only say what they hold.

Tickets come open-loop at `--rate`, each with the names of its prompt's beginnings; each lease is ended after `--hold` seconds.
"""

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc

from bench.figure import line, show
from forebay.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.cli import valkey

MODEL, HASH_TOKENS, NUM_HASHES, NUM_HEADS = "m@bf16", 64, 30, 50
WARM_SECONDS = 2.0


def cpu_seconds(pid: int) -> float:
    """A process's so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def scheduler() -> Iterator[tuple[str, list[int]]]:
    """Its address and (its pid, Valkey's), while both run."""
    with tempfile.TemporaryDirectory(prefix="fb-") as folder:
        socket = Path(folder) / "valkey.sock"
        store = subprocess.Popen(valkey.spec(Path(folder), socket).command, stdout=subprocess.DEVNULL)
        environment = {**os.environ, "FOREBAY_REDIS_URL": f"unix://{socket}", "FOREBAY_LISTEN_ADDRESS": "127.0.0.1:0"}
        process = subprocess.Popen([sys.executable, "-m", "services.scheduler"], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            events = (json.loads(text) for text in process.stdout)
            yield next(event["address"] for event in events if event.get("event") == "listening"), [process.pid, store.pid]
        finally:
            for child in (process, store):
                child.terminate()
                child.wait(30)


class Worker:
    """Attached; holds what it is given until it is told to let go."""

    def __init__(self, number: int) -> None:
        model = scheduler_pb2.WorkerModel(model=MODEL, version="v1", block_size=16, num_blocks=1 << 16, max_model_len=1 << 17, loaded=True)
        self.leases: dict[str, int] = {}
        self.worker_id = f"w{number}"
        self._factor = 1.0 if number % 2 else 3.0
        self._register = scheduler_pb2.Register(
            worker_id=self.worker_id, incarnation=f"i{number}", address=f"host-{number}:1", models=[model], max_sequences=64, max_waiting=2,
            max_step_tokens=2048,
        )  # fmt: skip

    async def requests(self) -> AsyncIterator[scheduler_pb2.AttachRequest]:
        """A registration, then a heartbeat a second."""
        yield scheduler_pb2.AttachRequest(register=self._register)
        step = scheduler_pb2.StepTimeModel(fixed_seconds=0.005 * self._factor, token_seconds=2e-5 * self._factor, key_seconds=5e-8)
        while True:
            leases = [scheduler_pb2.LeaseProgress(request_id=r, epoch=epoch, num_blocks=100) for r, epoch in self.leases.items()]
            beat = scheduler_pb2.Heartbeat(
                healthy=True, leases=leases, num_used_blocks=100 * len(leases), num_running=len(leases), step_time=step, utilization=0.5
            )
            yield scheduler_pb2.AttachRequest(heartbeat=beat)
            await asyncio.sleep(1.0)


class Load:
    """Tickets, one after another; remembers how long each placement took."""

    def __init__(self, channel: grpc.aio.Channel, workers: dict[str, Worker], hold_seconds: float) -> None:
        self._stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._workers = workers
        self._hold_seconds = hold_seconds
        self._rng = random.Random(1)
        self._heads = [[self._rng.randbytes(8) for _ in range(NUM_HASHES // 2)] for _ in range(NUM_HEADS)]
        self.times: list[float] = []
        self.num_refused = 0

    async def one(self, number: int) -> None:
        """Place, hold, Finish."""
        hashes = [*self._rng.choice(self._heads), *(self._rng.randbytes(8) for _ in range(NUM_HASHES // 2))]
        ticket = scheduler_pb2.Ticket(
            request_id=f"r{number}", org="bench", latency_class=types_pb2.LATENCY_CLASS_STANDARD, model=MODEL, model_version="v1",
            num_prompt_tokens=NUM_HASHES * HASH_TOKENS + 9, max_tokens=128, n=1, deadline_seconds=30, block_hashes=hashes,
            hash_tokens=HASH_TOKENS,
        )  # fmt: skip
        began = time.perf_counter()
        lease = scheduler_pb2.Lease()
        try:
            async for event in self._stub.Place(scheduler_pb2.PlaceRequest(ticket=ticket)):
                if event.HasField("placed"):
                    lease = event.placed
                    self.times.append(time.perf_counter() - began)
        except grpc.aio.AioRpcError:
            self.times.append(math.inf)
            self.num_refused += 1
            return
        worker = self._workers[lease.worker_id]
        worker.leases[ticket.request_id] = lease.epoch
        await asyncio.sleep(self._hold_seconds)
        del worker.leases[ticket.request_id]
        with suppress(grpc.aio.AioRpcError):  # it expires, then
            await self._stub.Finish(scheduler_pb2.FinishRequest(request_id=ticket.request_id, epoch=lease.epoch))

    async def run(self, rate: float, seconds: float, first: int) -> None:
        """At that rate for so long, from a first number on."""
        began, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one(first + number)))
        await asyncio.gather(*tasks)


async def measure(address: str, pids: list[int], arguments: argparse.Namespace) -> tuple[list[float], int, list[float]]:
    """(seconds of each placement behind the first ones, sorted, infinite where refused; how many were; CPU seconds of each process)"""
    workers = {worker.worker_id: worker for worker in map(Worker, range(arguments.workers))}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        calls = [stub.Attach(worker.requests()) for worker in workers.values()]
        for call in calls:
            await call.read()
        load = Load(channel, workers, arguments.hold)
        await load.run(arguments.rate, WARM_SECONDS, 0)
        load.times.clear()
        before = list(map(cpu_seconds, pids))
        await load.run(arguments.rate, arguments.seconds, 1_000_000)
        used = [cpu_seconds(pid) - cpu for pid, cpu in zip(pids, before, strict=True)]
        for call in calls:
            call.cancel()
    return sorted(load.times), load.num_refused, used


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--hold", type=float, default=0.5, help="seconds that a lease lasts")
    arguments = parser.parse_args()
    with scheduler() as (address, pids):
        times, num_refused, used = asyncio.run(measure(address, pids, arguments))
    show(line("place_refused", num_refused, "requests", 0, at_most=True))
    placed = [seconds for seconds in times if seconds < math.inf] or [math.nan]
    show(line("place_cpu_ms", 1e3 * used[0] / len(times), "ms of the scheduler's CPU, with Finish"))
    show(line("place_store_cpu_ms", 1e3 * used[1] / len(times), "ms of Valkey's CPU, with Finish"))
    show(line("place_p50_ms", 1e3 * placed[len(placed) // 2], "ms"))
    show(line("place_p99_ms", 1e3 * placed[int(len(placed) * 0.99)], "ms", 10, at_most=True))


if __name__ == "__main__":
    main()
