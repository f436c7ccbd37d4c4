"""A request's way to a lease: asks the schedulers in turn, waits where they say that it is worth it, and knows which epochs may be held.

Knows no worker's stream and no token.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import grpc

from forebay.v1 import scheduler_pb2
from services.common import tracing
from services.common.errors import Code, StatusError, from_rpc, unavailable
from services.common.tracing import Span
from services.gateway.mesh import Mesh, Scheduler
from services.gateway.prefix import HASH_TOKENS, block_hashes
from services.gateway.request import Admitted
from services.gateway.wire import cache_salt

_SHED = ("QUEUE_FULL", "SHED")  # who is told so is to come back later, and is told at once


class Deadline:
    """When a request must have ended."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._at = clock() + seconds

    def seconds_left(self, where: str) -> float:
        """More than 0; DEADLINE_EXCEEDED, naming the place, where nothing is left."""
        seconds = self._at - self._clock()
        if seconds <= 0:
            raise self.error(where)
        return seconds

    def error(self, where: str) -> StatusError:
        """What the client is told."""
        words = f"the deadline of {self._seconds:.3g} s passed {where}: allow more time or ask for less"
        return StatusError(Code.DEADLINE_EXCEEDED, words)

    async def pause(self, seconds: float) -> None:
        """Sleeps, at most to the deadline; for requests that wait to be placed."""
        await asyncio.sleep(min(seconds, self.seconds_left("in the queue")))


class Placement:
    """Leases of one request, one after another."""

    def __init__(
        self,
        mesh: Mesh,
        request: Admitted,
        deadline: Deadline,
        on_queued: Callable[[int], None] = lambda _: None,
        span: Span = tracing.OFF,
    ) -> None:
        """`on_queued` hears how many are before it."""
        self._mesh = mesh
        self._on_queued = on_queued
        self._model = request.model
        self._ticket = _ticket(request, span, mesh.region)
        self._span = span
        self._deadline = deadline
        self._epoch = request.lost_epoch
        self._had_lease = False
        self._asking = False  # a lease of the next epoch may be on its way

    @property
    def epochs(self) -> list[int]:
        """Epochs that may hold a lease. A call that is left while it is placed may have got one that nobody hears of."""
        return ([self._epoch] if self._had_lease else []) + ([self._epoch + 1] if self._asking else [])

    async def lease(self, num_delivered_tokens: int, awaited: Sequence[scheduler_pb2.DeadWorker] = ()) -> scheduler_pb2.Lease:
        """The next lease, behind the word of the dead workers `awaited`; StatusError with the scheduler's words, or DEADLINE_EXCEEDED.

        A scheduler that says "come back in a moment" is taken at its word. Once a worker was lost, UNAVAILABLE is waited out for longer:
        another worker may be about to appear.
        """
        if not self._model.level:
            raise unavailable(f"no worker has loaded {self._model.name} yet: try again in a moment", reason="MODEL_NOT_LOADED")
        patience = self._mesh.clock() + (self._mesh.limits.replace_patience if self._had_lease else self._mesh.limits.place_patience)
        excluded = self._mesh.excluded()
        attempt = 0
        while True:
            try:
                self._asking = True  # and so it stays if this call is cancelled
                lease = await self._ask(excluded, num_delivered_tokens, awaited)
                self._epoch, self._had_lease, self._asking = lease.epoch, True, False
                self._ticket.latency_class = lease.latency_class or self._ticket.latency_class
                return lease
            except StatusError as error:
                self._asking = False
                if error.code is not Code.UNAVAILABLE or error.reason in _SHED:
                    raise _seen_by_the_client(error, self._model.name) from None
                if not self._had_lease and excluded:
                    excluded = []  # better a doubtful worker than none
                    continue
                pause = self._mesh.backoff(attempt) if self._had_lease else self._mesh.pause(error, attempt)
                if self._mesh.clock() + pause > patience:
                    raise
            await self._deadline.pause(pause)
            excluded = self._mesh.excluded() if self._had_lease else []
            attempt += 1

    async def _ask(
        self, excluded: list[str], num_delivered_tokens: int, awaited: Sequence[scheduler_pb2.DeadWorker]
    ) -> scheduler_pb2.Lease:
        """Asks every scheduler until one knows. The next one's turn comes where one can't be reached or can't reach Redis."""
        request = scheduler_pb2.PlaceRequest(
            ticket=self._ticket,
            excluded_workers=excluded,
            lost_epoch=self._epoch,
            num_delivered_tokens=num_delivered_tokens,
            awaited=awaited,
        )
        return await self._mesh.ask(lambda scheduler: self._ask_one(scheduler, request))

    async def _ask_one(self, scheduler: Scheduler, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.Lease:
        # The ticket's bytes stay the same over calls; what is left of the deadline is the call's own.
        seconds = self._deadline.seconds_left("in the queue")
        with self._asking_for_a_place() as queued:
            call = tracing.inside(self._span, partial(scheduler.stub.Place, request, timeout=seconds))
            try:
                lease = await self._placed(call, queued)
            except BaseException:
                call.cancel()
                raise
        self._mesh.let_end(call)
        return lease

    def _asking_for_a_place(self) -> AbstractContextManager[Callable[[], None]]:
        """What runs already keeps its place, however full the queue is."""
        return (
            nullcontext(lambda: None) if self._had_lease else self._mesh.full_queues.asking(self._ticket.model, self._ticket.latency_class)
        )

    async def _placed(
        self, call: "grpc.aio.UnaryStreamCall[Any, scheduler_pb2.PlaceResponse]", queued: Callable[[], None]
    ) -> scheduler_pb2.Lease:
        silence: float | None = self._mesh.limits.scheduler_answer
        try:
            while True:
                async with asyncio.timeout(silence):
                    event = await call.read()
                if not isinstance(event, scheduler_pb2.PlaceResponse):
                    raise StatusError(Code.UNAVAILABLE, "it ended the placement without a word")
                queued()
                if event.HasField("placed"):
                    return event.placed
                self._on_queued(event.queued.position)
                silence = None  # it knows the ticket; the connection's keepalive watches from here
        except TimeoutError:
            raise StatusError(Code.UNAVAILABLE, "it is silent") from None
        except grpc.aio.AioRpcError as failure:
            error = from_rpc(failure)
            raise (self._deadline.error("in the queue") if error.code is Code.DEADLINE_EXCEEDED else error) from None


async def reserve(mesh: Mesh, requests: Sequence[Admitted], deadline: Deadline) -> None:
    """Takes the quota of all these requests of one org, or of none: before each is placed. Raises StatusError, as placing them would."""
    model = requests[0].model
    if not model.level:
        return  # which placing says
    mesh.full_queues.check(model.full_name, requests[0].latency_class)
    asked = scheduler_pb2.ReserveRequest(tickets=[_ticket(request, tracing.OFF, mesh.region) for request in requests])

    async def question(scheduler: Scheduler) -> None:
        seconds = min(mesh.limits.scheduler_answer, deadline.seconds_left("in the queue"))
        await scheduler.stub.Reserve(asked, timeout=seconds)

    try:
        await mesh.ask_patiently(question)
    except StatusError as error:
        raise _seen_by_the_client(error, model.name) from None


def _seen_by_the_client(error: StatusError, model: str) -> StatusError:
    """A refusal. Where the org's policy has changed since admission, it is what admission will say in a moment."""
    if error.reason == "MODEL_NOT_ALLOWED":
        return StatusError(Code.NOT_FOUND, f"there is no model {model}", reason="MODEL_NOT_FOUND")
    return error


def _ticket(request: Admitted, span: Span, region: str) -> scheduler_pb2.Ticket:
    hashes = block_hashes(cache_salt(request.org), request.model.version, request.prefix)
    return scheduler_pb2.Ticket(
        request_id=request.request_id,
        org=request.org,
        latency_class=request.latency_class,
        model=request.model.full_name,
        model_version=request.model.version,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        n=request.n,
        deadline_seconds=request.deadline_seconds,
        traceparent=span.traceparent,
        block_hashes=hashes,
        hash_tokens=HASH_TOKENS if hashes else 0,
        region=region,
    )
