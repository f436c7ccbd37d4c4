"""Channels to the schedulers and workers of the mesh, and what this gateway learned about them. Knows no request's course."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from forebay.v1 import admin_pb2, admin_pb2_grpc, batch_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.common import log, rpc, tracing
from services.common.errors import Code, StatusError, from_rpc, unavailable
from services.common.tls import Identity
from services.gateway.full_queues import FullQueues
from services.gateway.worker_stream import PLAIN_SECONDS, Subscription, WorkerStream

_log = log.get(__name__)

Answer = TypeVar("Answer")
_STORE_AWAY, _NO_SCHEDULER = "STORE_UNAVAILABLE", "NO_SCHEDULER"
_LAST_CALLS_SECONDS = 3600.0
"""How long calls may go on over a channel that has been replaced."""


@dataclass(frozen=True)
class MeshLimits:
    """How patient a gateway is. Seconds, unless said."""

    worker_silence: float = 3.0  # a worker pings each second
    scheduler_answer: float = 3.0  # until Place says its first word
    place_patience: float = 0.9  # a refusal that says "in a moment" is waited out so long: Redis stalls, another scheduler takes over
    replace_patience: float = 30.0  # a request that lost its worker waits this long for another, or for the same to be started again
    exclusion: float = 5.0  # a worker that could not be reached is avoided
    max_attempts: int = 6  # placements of one request
    retry_capacity: float = 100.0  # re-placements that may happen at once, over all requests
    retry_ratio: float = 0.2  # and per request beyond that: attempts <= 1.2 x offered
    retry_per_second: float = 4.0  # and per second: a worker with 32 streams may die every 8 s, however few the other requests are
    finish_patience: float = 60.0  # an outage of Redis or of all schedulers is outlived so long by what has been used
    max_finishing: int = 4096  # finished requests that no scheduler has heard of yet
    backoff: float = 0.05  # first pause after a refusal, doubled each time, at most 1 s, 5 s of a finish


def _is_its_own(error: StatusError) -> bool:
    """Whether it is one scheduler's trouble and another may do better. A refusal says when to come back; gRPC's UNAVAILABLE doesn't.

    CANCELLED is a server that stops: what is cancelled here raises CancelledError.
    """
    return error.code is Code.CANCELLED or (
        error.code is Code.UNAVAILABLE and (error.retry_after_seconds is None or error.reason == _STORE_AWAY)
    )


class RetryBudget:
    """Bounds re-placements over all requests, so that a failing fleet isn't also hammered."""

    def __init__(self, capacity: float, ratio: float, per_second: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._ratio = ratio
        self._per_second = per_second
        self._clock = clock
        self._left = capacity
        self._at = clock()

    def earn(self) -> None:
        """A new request arrived."""
        self._left = min(self._capacity, self._left + self._ratio)

    def spend(self) -> bool:
        """False where nothing is left."""
        now = self._clock()
        self._left = min(self._capacity, self._left + self._per_second * (now - self._at))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass
class Worker:
    """One worker's stub, and the subscription by which its requests' news come."""

    channel: grpc.aio.Channel
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    num_calls: int = 0
    subscription: Subscription | None = None
    plain_until: float = 0.0  # it doesn't know subscriptions

    def generate(self, request: worker_pb2.WorkerServiceGenerateRequest, timeout: float, now: float) -> WorkerStream:
        """Runs a request there."""
        subscription = self._subscribed(now)
        if subscription is None:
            return WorkerStream(self.stub.Generate(request, timeout=timeout))
        request.delivery.CopyFrom(subscription.delivery())
        number = request.delivery.stream
        stream = WorkerStream(self.stub.Generate(request, timeout=timeout), lambda: subscription.detach(number))
        subscription.attach(number, stream)
        return stream

    def _subscribed(self, now: float) -> Subscription | None:
        if self.subscription is not None and not self.subscription.is_open:
            self.plain_until = now + PLAIN_SECONDS if self.subscription.unknown else 0.0
            self.subscription = None
        if self.subscription is None and now >= self.plain_until:
            self.subscription = tracing.inside(tracing.OFF, lambda: Subscription(self.stub))
        return self.subscription

    def retire(self) -> None:
        """No request comes any more."""
        if self.subscription is not None:
            self.subscription.retire()


@dataclass
class Scheduler:
    """One scheduler's stubs."""

    address: str
    channel: grpc.aio.Channel
    stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub"
    admin: "admin_pb2_grpc.AdminServiceAsyncStub"
    batches: "batch_pb2_grpc.BatchServiceAsyncStub"
    failed_until: float = 0.0


class Mesh:
    """Channels to schedulers and workers, and what this gateway learned about them. One per process."""

    def __init__(
        self,
        schedulers: Sequence[str],
        limits: MeshLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
        region: str = "",
    ) -> None:
        """`region`: label of where this gateway is."""
        if not schedulers:
            raise ValueError("no scheduler address given: set FOREBAY_SCHEDULERS to host:port[,host:port...]")
        self.limits = limits or MeshLimits()
        self.clock = clock
        self.budget = RetryBudget(self.limits.retry_capacity, self.limits.retry_ratio, self.limits.retry_per_second, clock)
        self.full_queues = FullQueues(clock)
        self.region = region
        self._identity = identity
        self._version = identity.version if identity else 0  # of the identity, that the channels go by
        self._schedulers = [self._connect(address) for address in schedulers]
        self._turn = random.randrange(len(schedulers))  # noqa: S311  # spreads gateways, guards nothing
        self._workers: dict[str, Worker] = {}
        self._excluded_until: dict[str, float] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._ending: set[Any] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def _connect(self, address: str) -> Scheduler:
        channel = rpc.channel(address, self._identity, "scheduler")
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        batches: Any = batch_pb2_grpc.BatchServiceStub(channel)
        return Scheduler(address, channel, stub, admin, batches)

    def in_turn(self) -> list[Scheduler]:
        """All schedulers, those that failed lately last, the others from the one whose turn it is."""
        self._turn = (self._turn + 1) % len(self._schedulers)
        order = self._schedulers[self._turn :] + self._schedulers[: self._turn]
        now = self.clock()
        return sorted(order, key=lambda scheduler: scheduler.failed_until > now)

    def failed(self, scheduler: Scheduler, why: str) -> None:
        """It could not be reached or can't work: others are asked first for a while. Said in the log alone, as it names addresses."""
        if scheduler.failed_until <= self.clock():
            _log.warning("scheduler_failed", scheduler=scheduler.address, why=why)
        scheduler.failed_until = self.clock() + self.limits.exclusion

    async def ask(self, question: Callable[[Scheduler], Awaitable[Answer]], *, once: bool = False) -> Answer:
        """What the first scheduler says that can. Raises its refusal; UNAVAILABLE where none answers. `once`: one is asked at most."""
        refusal = unavailable("no scheduler answers: try again", reason=_NO_SCHEDULER)
        for scheduler in self.in_turn()[: 1 if once else None]:
            try:
                return await question(scheduler)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc(failure)
                passes = _is_its_own(error) or error.code is Code.DEADLINE_EXCEEDED  # it was too slow for us
            except StatusError as refused:
                error = refused
                passes = _is_its_own(error)
            if not passes:
                raise error
            if error.reason == _STORE_AWAY:
                refusal = error
            self.failed(scheduler, error.message)
        raise refusal

    async def ask_patiently(self, question: Callable[[Scheduler], Awaitable[Answer]]) -> Answer:
        """As `ask`, but a moment's trouble is waited out, as a placement does. What is asked twice may have been heard twice."""
        until = self.clock() + self.limits.place_patience
        for attempt in itertools.count():
            try:
                return await self.ask(question)
            except StatusError as error:
                pause = self.pause(error, attempt)
                if error.code is not Code.UNAVAILABLE or self.clock() + pause > until:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("it counts for ever")

    def pause(self, refusal: StatusError, attempt: int) -> float:
        """Seconds until it is asked again: as it says. Where no scheduler said anything, one may be back any moment (rpc.channel)."""
        return self.backoff(attempt) if refusal.reason == _NO_SCHEDULER else refusal.retry_after_seconds or 0.0

    def backoff(self, attempt: int, most: float = 1.0) -> float:
        """Seconds to pause before another try, with jitter."""
        return float(min(most, self.limits.backoff * 2**attempt) * random.uniform(0.5, 1))  # noqa: S311  # guards nothing

    @contextmanager
    def worker(self, address: str) -> Iterator[Worker]:
        """A worker, its channel kept while in use and as long as the fleet lists it."""
        worker = self._workers.get(address)
        if worker is None:
            channel = rpc.channel(address, self._identity, "worker")
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            worker = self._workers[address] = Worker(channel, stub)
        worker.num_calls += 1
        try:
            yield worker
        finally:
            worker.num_calls -= 1

    @property
    def worker_addresses(self) -> list[str]:
        """Workers with an open channel."""
        return sorted(self._workers)

    def exclude(self, worker_id: str) -> None:
        """Avoids a worker that could not be reached, for a while."""
        self._excluded_until[worker_id] = self.clock() + self.limits.exclusion

    def excluded(self) -> list[str]:
        """Workers to avoid now."""
        now = self.clock()
        self._excluded_until = {worker: until for worker, until in self._excluded_until.items() if until > now}
        return sorted(self._excluded_until)

    def let_end(self, call: Any) -> None:
        """Its last message is here and its status on the way: nobody waits for that, and nobody cuts it off."""
        self._ending.add(call)
        call.add_done_callback(self._ending.discard)

    async def fleet(self, timeout: float = 2.0) -> admin_pb2.GetFleetResponse:
        """The fleet as some scheduler sees it; UNAVAILABLE where none answers. Closes channels to workers that are gone."""
        self._renew_channels()
        fleet = await self.ask(lambda scheduler: scheduler.admin.GetFleet(admin_pb2.GetFleetRequest(), timeout=timeout))
        await self._forget_workers({worker.registration.address for worker in fleet.workers})
        return fleet

    def _renew_channels(self) -> None:
        """A channel goes on with the certificate that it was made with: new ones when that has changed. Calls end on the old ones."""
        if self._identity is None:
            return
        self._identity.look()
        if self._identity.version == self._version:
            return
        self._version = self._identity.version
        old = [worker.channel for worker in self._workers.values()] + [scheduler.channel for scheduler in self._schedulers]
        for worker in self._workers.values():
            worker.retire()
        self._workers.clear()
        for scheduler in self._schedulers:  # in place: calls that ask one after the other hold on to it
            fresh = self._connect(scheduler.address)
            scheduler.channel, scheduler.stub, scheduler.admin, scheduler.batches = fresh.channel, fresh.stub, fresh.admin, fresh.batches
        for channel in old:
            task = asyncio.create_task(channel.close(_LAST_CALLS_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _forget_workers(self, known: set[str]) -> None:
        gone = [address for address, worker in self._workers.items() if address not in known and worker.num_calls == 0]
        # All are out of sight before the first is awaited: meanwhile another look may come by, or a call take up an address again.
        for worker in [self._workers.pop(address) for address in gone]:
            worker.retire()
            await worker.channel.close()

    @property
    def num_finishing(self) -> int:
        """Finished requests that no scheduler has heard of yet."""
        return len(self._finishing)

    def finish(self, request: scheduler_pb2.FinishRequest) -> None:
        """Ends a lease in the background: the client doesn't wait for it."""
        if len(self._finishing) >= self.limits.max_finishing:
            self._give_up(request, "TOO_MANY")
            return
        task = asyncio.create_task(self._finish(request))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, request: scheduler_pb2.FinishRequest) -> None:
        until = self.clock() + self.limits.finish_patience
        for attempt in itertools.count():
            for scheduler in self.in_turn():
                try:
                    await scheduler.stub.Finish(request, timeout=2.0)
                    return
                except grpc.aio.AioRpcError as error:
                    failure = error
            if self.clock() >= until:
                self._give_up(request, failure.code().name)
                return
            await asyncio.sleep(self.backoff(attempt, most=5.0))

    def _give_up(self, request: scheduler_pb2.FinishRequest, why: str) -> None:
        """The lease expires by itself and is settled from the worker's last count."""
        _log.warning("finish_failed", request_id=request.request_id, code=why)

    async def close(self, patience_seconds: float = 2.0) -> None:
        """Waits a little for leases that are just ending, then closes every channel."""
        if self._finishing:
            _, pending = await asyncio.wait(self._finishing, timeout=patience_seconds)
            for task in pending:
                task.cancel()
        for task in self._closing:
            task.cancel()
        for worker in self._workers.values():
            worker.retire()
            await worker.channel.close()
        for scheduler in self._schedulers:
            await scheduler.channel.close()
