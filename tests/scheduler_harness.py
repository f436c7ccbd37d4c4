"""For tests of the scheduler: tickets and workers to hand, a ledger on a real Redis, whole schedulers and workers that attach."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from forebay.v1 import admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.common import errors, rpc
from services.policy.org import OrgPolicy
from services.policy.watched import PolicyFile
from services.scheduler import keys
from services.scheduler.ledger import Held, Lease, Ledger, Queued, Settlement, Timing, View
from services.scheduler.policy.fleet import ServedModel, Worker
from services.scheduler.policy.order import Ticket
from services.scheduler.policy.pick import Placement
from services.scheduler.policy.rules import Rules
from services.scheduler.scheduler import Options, Scheduler
from services.scheduler.server import add_services
from services.scheduler.store import Store

MODEL = "tiny@fp32"
QUICK = Timing(stream_gone=0.3, start=0.4, lease=0.5, pause=5.0)


def make_ticket(request_id: str = "r", **fields: Any) -> Ticket:
    """A small standard ticket."""
    return replace(Ticket(request_id, "acme", 2, MODEL, "v1", 16, 16), **fields)


def make_worker(worker_id: str = "w1", incarnation: str = "i1", *, slots: int = 4, num_blocks: int = 64) -> Worker:
    """The policy's view of an empty worker."""
    return Worker(worker_id, incarnation, f"{worker_id}:1", slots, slots, {MODEL: ServedModel("v1", 16, num_blocks, 1024)})


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 15) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.005)


class LedgerBench:
    """A ledger and what tests ask of it again and again."""

    def __init__(self, store: Store, *, max_queued: int = 100, timing: Timing = QUICK) -> None:
        self.store = store
        self.ledger = Ledger(store, "s1", max_queued=max_queued, timing=timing)

    async def enqueue(
        self, ticket: Ticket, holder: str = "h", *, lost_epoch: int = 0, deadline_seconds: float = 60.0, org: OrgPolicy | None = None
    ) -> Any:
        """See Ledger.enqueue. Without a policy the org is not limited."""
        org = org or OrgPolicy(ticket.org)
        return await self.ledger.enqueue(ticket, holder, org, deadline_seconds=deadline_seconds, lost_epoch=lost_epoch)

    async def finish(self, request_id: str, epoch: int, num_output_tokens: int) -> tuple[bool, str]:
        """See Ledger.finish."""
        return await self.ledger.finish(request_id, epoch, Settlement(prompt_tokens=16, completion_tokens=num_output_tokens))

    async def queue(self, ticket: Ticket, holder: str = "h") -> Ticket:
        """The ticket with its order, queued."""
        answer = await self.enqueue(ticket, holder)
        assert isinstance(answer, Queued)
        return replace(ticket, order=answer.order)

    async def commit(self, ticket: Ticket, worker: Worker, *, slots: int = 1, blocks: int = 2, rules: Rules | None = None) -> Lease | str:
        """One commit."""
        placement = Placement(ticket, worker, slots, blocks, worker.models[MODEL].num_blocks)
        (outcome,) = await self.ledger.commit([placement], rules or Rules())
        return outcome

    async def place(self, ticket: Ticket, worker: Worker, *, holder: str = "h", slots: int = 1, blocks: int = 2) -> Lease:
        """Queues and commits; the worker is registered first."""
        await self.ledger.register(worker.worker_id, worker.incarnation)
        await self.queue(ticket, holder)
        lease = await self.commit(ticket, worker, slots=slots, blocks=blocks)
        assert isinstance(lease, Lease), lease
        return lease

    async def beat(self, worker: Worker, *leases: Lease, used: int = 0, tokens: int = 1, held: int = 2) -> list[tuple[str, int]] | None:
        """A heartbeat that lists these leases, with so many tokens and blocks each."""
        return await self.ledger.heartbeat(worker, used, [Held(lease.request_id, lease.epoch, tokens, held) for lease in leases])

    async def used(self, worker: Worker) -> tuple[int, int] | None:
        """Slots and blocks in use, None if the worker may not be used."""
        usable = (await self.view(worker)).workers
        return (sum(usable[0].used_slots), sum(usable[0].used_blocks)) if usable else None

    async def view(self, *workers: Worker, max_heads: int = 64, preemptible: bool = True) -> View:
        """See Ledger.view."""
        return await self.ledger.view(workers, max_heads, preemptible=preemptible)

    async def served(self, ticket: Ticket) -> float | None:
        """Tokens that the ticket's org was given in its line while it waits there, divided by its weight; None if it doesn't wait."""
        line = keys.line_name(ticket.model, ticket.latency_class)
        queue = keys.queue_name(ticket.model, ticket.latency_class, ticket.org)
        return next((served for name, (served, _) in (await self.ledger.queued([line])).items() if name == queue), None)

    async def waiting(self) -> list[str]:
        """Request ids in all queues, by class and order."""
        survey = await self.ledger.survey()
        queued = await self.ledger.queued({line_of(queue) for queue in survey.queues})
        return [
            request_id for _, request_id in sorted((order, request_id) for _, entries in queued.values() for request_id, order in entries)
        ]

    async def sweep_until(self, request_id: str) -> str:
        """Sweeps until this one is swept; why it was."""
        reasons: dict[str, str] = {}

        async def swept() -> bool:
            reasons.update({ended.request_id: ended.reason for ended in await self.ledger.sweep()})
            return request_id in reasons

        await until(swept)
        return reasons[request_id]

    async def raw(self, *words: str | int | float) -> Any:
        """One Redis command."""
        (reply,) = await self.store.commands(list(words))
        return reply


def line_of(queue: str) -> str:
    """The line that a queue is a part of."""
    return keys.line_name(*keys.parse_queue(queue)[:2])


@asynccontextmanager
async def ledger_bench(url: str, **options: Any) -> AsyncIterator[LedgerBench]:
    """A bench on this Redis."""
    store = Store(url, timeout_seconds=5)
    await store.open()
    try:
        yield LedgerBench(store, **options)
    finally:
        await store.close()


@dataclass
class RunningScheduler:
    """A scheduler that serves in this process."""

    scheduler: Scheduler
    address: str
    channel: grpc.aio.Channel
    server: grpc.aio.Server
    store: Store
    stub: Any = field(init=False)
    admin: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def place(self, ticket: scheduler_pb2.Ticket, **fields: Any) -> Any:
        """Opens a Place stream."""
        return self.stub.Place(scheduler_pb2.PlaceRequest(ticket=ticket, **fields))

    async def kill(self) -> None:
        """As SIGKILL would: its streams break, nothing is tidied up."""
        self.scheduler.stopping = True  # Else the broken streams would be taken for leaving gateways and workers.
        for task in self.scheduler._loops:
            task.cancel()
        for waiter in self.scheduler.waiting:
            waiter.settle(errors.StatusError(errors.Code.UNAVAILABLE, "killed", reason="STOPPING"))
        await self.server.stop(None)


@asynccontextmanager
async def running_scheduler(
    url: str, scheduler_id: str = "s1", *, redis_timeout: float = 2.0, policy: PolicyFile | None = None, **options: Any
) -> AsyncIterator[RunningScheduler]:
    """A whole scheduler with fast clocks."""
    store = Store(url, timeout_seconds=redis_timeout)
    await store.open(wait_seconds=5)
    fast: dict[str, Any] = {"poll_seconds": 0.05, "tell_seconds": 0.05, "no_worker_seconds": 0.5, "timing": Timing(1.0, 1.0, 1.5, 0.5)}
    scheduler = Scheduler(store, Options(scheduler_id=scheduler_id, **{**fast, **options}), policy)
    await scheduler.refresh()
    server = rpc.server()
    add_services(server, scheduler)
    port = rpc.bind(server, "127.0.0.1:0")
    scheduler.start()
    await server.start()
    address = f"127.0.0.1:{port}"
    async with rpc.channel(address) as channel:
        try:
            yield RunningScheduler(scheduler, address, channel, server, store)
        finally:
            await scheduler.stop()
            await server.stop(None)
            await scheduler.drain()
            await store.close()


_numbers = itertools.count()


def wire_ticket(request_id: str = "", **fields: Any) -> scheduler_pb2.Ticket:
    """A small standard ticket as a gateway sends it."""
    defaults: dict[str, Any] = {"org": "acme", "latency_class": 2, "model": MODEL, "model_version": "v1", "num_prompt_tokens": 16}
    defaults |= {"max_tokens": 16, "n": 1, "deadline_seconds": 30.0}
    return scheduler_pb2.Ticket(request_id=request_id or f"request-{next(_numbers)}", **{**defaults, **fields})


class FakeWorker:
    """Attaches to schedulers, lists what it is told to hold, and remembers what was revoked."""

    def __init__(
        self,
        worker_id: str = "w1",
        incarnation: str = "i1",
        *,
        slots: int = 4,
        num_blocks: int = 64,
        beat_seconds: float = 0.05,
        died_with: Iterable[tuple[str, int, int]] = (),
        node_id: str = "",
    ) -> None:
        model = scheduler_pb2.WorkerModel(model=MODEL, version="v1", block_size=16, num_blocks=num_blocks, loaded=True)
        model.max_model_len = min(1024, num_blocks * 16)
        self.register = scheduler_pb2.Register(
            worker_id=worker_id, incarnation=incarnation, address=f"{worker_id}:1", models=[model], max_sequences=slots, max_waiting=2
        )
        self.register.node_id = node_id
        for request_id, epoch, num_output_tokens in died_with:
            self.register.died_with.add(request_id=request_id, epoch=epoch, num_output_tokens=num_output_tokens)
        self.leases: dict[str, scheduler_pb2.LeaseProgress] = {}
        self.revoked: list[tuple[str, int]] = []
        self.state = scheduler_pb2.Heartbeat(healthy=True)
        self.model_acts: list[tuple[int, str]] = []
        self.says: str | None = "does as it is told"  # of an act; None: nothing
        self.refuses = False
        self.num_registered = 0
        self.last_error: grpc.aio.AioRpcError | None = None
        self._beat_seconds = beat_seconds
        self._streams: list[asyncio.Task[None]] = []

    def accept(self, lease: scheduler_pb2.Lease, num_blocks: int = 2) -> None:
        """Works on a lease from now on."""
        self.leases[lease.request_id] = scheduler_pb2.LeaseProgress(request_id=lease.request_id, epoch=lease.epoch, num_blocks=num_blocks)

    async def attach(self, *schedulers: RunningScheduler) -> "FakeWorker":
        """Attaches to each and stays; returns when all have confirmed."""
        expected = self.num_registered + len(schedulers)
        self._streams += [asyncio.create_task(self._stay(scheduler.address)) for scheduler in schedulers]
        await until(lambda: self.num_registered >= expected)
        return self

    async def detach(self) -> None:
        """Breaks every stream."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._streams.clear()

    async def _stay(self, address: str) -> None:
        async with rpc.channel(address) as channel:
            while True:
                await self._attach_once(channel)
                await asyncio.sleep(self._beat_seconds)

    async def _attach_once(self, channel: grpc.aio.Channel) -> None:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(self._requests())
        try:
            async for response in call:
                if response.HasField("registered"):
                    self.num_registered += 1
                elif response.HasField("drain"):
                    self.state.drained = response.drain.drain
                elif response.HasField("pins"):
                    self.state.pins[:] = response.pins.models
                elif response.HasField("model_act"):
                    self._obey(response.model_act)
                else:
                    self.revoked += [(lease.request_id, lease.epoch) for lease in response.revoke.leases]
                    for lease in response.revoke.leases:
                        self.leases.pop(lease.request_id, None)
        except grpc.aio.AioRpcError as error:
            self.last_error = error
        finally:
            call.cancel()

    def _obey(self, act: scheduler_pb2.ModelAct) -> None:
        self.model_acts.append((act.kind, act.model))
        if act.act_id and self.says is not None:
            self.state.outcomes.add(act_id=act.act_id, refused=self.refuses, words=self.says)

    async def _requests(self) -> AsyncIterator[scheduler_pb2.AttachRequest]:
        yield scheduler_pb2.AttachRequest(register=self.register)
        while True:
            heartbeat = scheduler_pb2.Heartbeat()
            heartbeat.CopyFrom(self.state)
            heartbeat.leases.extend(self.leases.values())
            heartbeat.num_used_blocks = sum(lease.num_blocks for lease in self.leases.values())
            yield scheduler_pb2.AttachRequest(heartbeat=heartbeat)
            await asyncio.sleep(self._beat_seconds)


@asynccontextmanager
async def fake_worker(*schedulers: RunningScheduler, **options: Any) -> AsyncIterator[FakeWorker]:
    """A worker attached to these."""
    worker = FakeWorker(**options)
    await worker.attach(*schedulers)
    try:
        yield worker
    finally:
        await worker.detach()


async def lease_of(call: Any) -> scheduler_pb2.Lease:
    """Reads a Place stream to its lease."""
    async for response in call:
        if response.HasField("placed"):
            return response.placed
    raise AssertionError("the stream ended without a lease")


async def queue_is(scheduler: RunningScheduler, depth: int) -> bool:
    """Whether so many tickets wait, over all lines."""
    survey = await scheduler.scheduler.ledger.survey()
    return sum(num for num, _ in survey.queues.values()) == depth


async def failure_of(call: Any) -> errors.StatusError:
    """Reads a Place stream to its error."""
    try:
        lease = await lease_of(call)
    except grpc.aio.AioRpcError as error:
        return errors.from_rpc(error)
    raise AssertionError(f"placed on {lease.worker_id}")
