"""WorkerService: one Generate or Embed call is one lease. The call's end, however it comes, is the lease's end."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Protocol, cast

import grpc

from forebay.v1 import worker_pb2, worker_pb2_grpc
from services.common import errors, tracing
from services.common.errors import Code, StatusError
from services.worker.embed_lease import EmbedLease
from services.worker.grammars import compiled
from services.worker.leases import Lease, Leases
from services.worker.outbox import News, Pace
from services.worker.subscriptions import Carried, Subscriptions
from services.worker.wire import Served, target

CALLERS = {"/forebay.": "gateway"}
"""The role that may call what, where certificates tell it."""

LEAST_SECONDS = 0.002
"""gRPC rounds deadlines up to milliseconds: what has less left than this is late."""

FLUSH_SECONDS = 1.0
"""A gateway that takes nothing for so long from a subscription hears of a request's end all the same."""

Request = worker_pb2.WorkerServiceGenerateRequest
Response = worker_pb2.WorkerServiceGenerateResponse
Context = grpc.aio.ServicerContext[Request, Response]
EmbedRequest = worker_pb2.WorkerServiceEmbedRequest
EmbedResponse = worker_pb2.WorkerServiceEmbedResponse
EmbedContext = grpc.aio.ServicerContext[EmbedRequest, EmbedResponse]
SubscribeRequest = worker_pb2.WorkerServiceSubscribeRequest
SubscribeContext = grpc.aio.ServicerContext[SubscribeRequest, worker_pb2.WorkerServiceSubscribeResponse]
AnyContext = grpc.aio.ServicerContext[Any, Any]


class Writer(Protocol):
    """Where a stream's messages go: its own call, or a subscription."""

    async def write(self, message: Any, /) -> None:
        """Returns when the next one may come."""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Streams of tokens for gateways.

    Written with `context.write` and not as a generator: a cancelled call then always raises in here, and never leaves a
    generator behind that nobody resumes.
    """

    def __init__(self, leases: Leases, models: Mapping[str, Served], incarnation: str, *, pace: Pace | None = None) -> None:
        self._leases = leases
        self._models = models
        self._incarnation = incarnation
        self._pace = pace or Pace()
        self._subscriptions = Subscriptions()

    def close(self) -> None:
        """Ends what ends with the worker alone."""
        self._subscriptions.close()

    async def Subscribe(self, requests: AsyncIterator[SubscribeRequest], context: SubscribeContext) -> None:  # type: ignore[override]  # as Generate
        """Carries the news of a gateway's requests; see worker.proto."""
        try:
            await self._subscriptions.serve(requests, context)
        except StatusError as error:
            await errors.abort(context, error)

    async def Generate(self, request: Request, context: Context) -> None:  # type: ignore[override]  # a coroutine that writes will do, too
        """Runs a leased request; see worker.proto."""
        try:
            deadline = _deadline(context)
            served = target(request, self._models, self._incarnation)
            lease = self._leases.admit(request, served, await compiled(request.sampling, served.compiler))
        except StatusError as error:
            await errors.abort(context, error)
        lease.span = tracing.current()
        # The call's own end frees the blocks even where this coroutine is kept from its `finally`.
        context.add_done_callback(lambda _: self._leases.end(lease))  # type: ignore[arg-type]  # the stub wants a class of its own
        subscription = self._subscriptions.of(request.delivery)
        try:
            with subscription.stream(request.delivery.stream) if subscription else nullcontext() as carried:
                try:
                    await self._stream(lease, carried or context, deadline)
                finally:
                    if carried is not None:
                        await self._flush(carried)
        except StatusError as error:
            self._leases.end(lease)
            await errors.abort(context, error)
        finally:
            self._leases.end(lease)

    async def _flush(self, carried: Carried) -> None:
        """What a subscription has of a request is on its way before the call's own status."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await carried.flush()

    async def Embed(self, request: EmbedRequest, context: EmbedContext) -> None:  # type: ignore[override]  # as Generate
        """Runs a leased request for vectors; see worker.proto."""
        try:
            deadline = _deadline(context)
            lease = self._leases.admit_embedding(request, target(request, self._models, self._incarnation))
        except StatusError as error:
            await errors.abort(context, error)
        lease.span = tracing.current()
        context.add_done_callback(lambda _: self._leases.end(lease))  # type: ignore[arg-type]  # as Generate
        try:
            await self._stream_vectors(lease, context, deadline)
        except StatusError as error:
            self._leases.end(lease)
            await errors.abort(context, error)
        finally:
            self._leases.end(lease)

    async def _stream_vectors(self, lease: EmbedLease, context: EmbedContext, deadline: float | None) -> None:
        await self._write(context, EmbedResponse(accepted=worker_pb2.Accepted(fingerprint=lease.served.fingerprint)))
        while (news := await lease.outbox.next(deadline)) is not News.ENDED:
            if news is News.SILENCE:
                await self._write(context, EmbedResponse(ping=worker_pb2.Ping(waiting=lease.is_waiting)))
            else:
                await self._write(context, EmbedResponse(vectors=news))
        await self._write(context, EmbedResponse(completed=worker_pb2.Completed(usage=lease.usage, timeline=lease.told_timeline)))

    async def _stream(self, lease: Lease, writer: Writer, deadline: float | None) -> None:
        await self._write(writer, Response(accepted=worker_pb2.Accepted(fingerprint=lease.served.fingerprint)))
        told = None
        while (news := await lease.outbox.next(deadline)) is not News.ENDED:
            if news is News.SILENCE:
                await self._write(writer, Response(ping=worker_pb2.Ping(waiting=self._leases.is_waiting(lease))))
            else:
                if lease.timeline is not told and lease.num_sequences:  # where all has ended, Completed tells more
                    told = lease.timeline
                    news.timeline.MergeFrom(lease.told_timeline)
                await self._write(writer, Response(deltas=news))
        await self._write(writer, Response(completed=worker_pb2.Completed(usage=lease.usage, timeline=lease.told_timeline)))

    async def _write(self, writer: Writer, response: Response | EmbedResponse) -> None:
        """Sends a message; StatusError where the reader doesn't take it."""
        try:
            async with asyncio.timeout(self._pace.write_seconds):
                await writer.write(response)
        except TimeoutError:
            message = f"the reader took nothing for {self._pace.write_seconds:g} s"
            raise StatusError(Code.RESOURCE_EXHAUSTED, message, reason="SLOW_READER") from None


def _deadline(context: AnyContext) -> float | None:
    """The call's deadline by the event loop's clock. StatusError where it has passed on arrival."""
    remaining = cast("float | None", context.time_remaining())  # the stub forgets calls without a deadline
    if remaining is None:
        return None
    if remaining < LEAST_SECONDS:
        raise StatusError(Code.DEADLINE_EXCEEDED, "the deadline had passed when the request came")
    return asyncio.get_running_loop().time() + remaining
