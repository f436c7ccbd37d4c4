"""SchedulerService, and all services on one server: protos in, protos out. What happens is decided elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import grpc

from forebay.v1 import admin_pb2_grpc, batch_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common import errors, rpc, tracing
from services.common.errors import Code, StatusError, invalid
from services.common.metrics import exemplar
from services.scheduler import keys, quota
from services.scheduler.admin import AdminServicer
from services.scheduler.attachment import AttachContext, Attachment
from services.scheduler.audit import Act
from services.scheduler.batch_server import BatchServicer
from services.scheduler.claims import Claim
from services.scheduler.ledger import Lease
from services.scheduler.metrics import class_label, finish_label
from services.scheduler.policy.fleet import impossible
from services.scheduler.policy.order import Ticket
from services.scheduler.scheduler import Scheduler
from services.scheduler.waiting import Position, Waiter, deadline_passed
from services.scheduler.wire import (
    check_claim,
    check_id,
    decision_to_proto,
    org_to_proto,
    read_place,
    read_reserve,
    read_settlement,
)

SERVICES = ["forebay.v1.SchedulerService", "forebay.v1.AdminService", "forebay.v1.BatchService"]
CALLERS = {"/forebay.v1.SchedulerService/Attach": "worker", "/forebay.": "gateway"}
"""The role that may call what, where certificates tell it."""

PlaceContext = grpc.aio.ServicerContext[scheduler_pb2.PlaceRequest, scheduler_pb2.PlaceResponse]
FinishContext = grpc.aio.ServicerContext[scheduler_pb2.FinishRequest, scheduler_pb2.FinishResponse]
AuthenticateContext = grpc.aio.ServicerContext[scheduler_pb2.AuthenticateRequest, scheduler_pb2.AuthenticateResponse]
ReserveContext = grpc.aio.ServicerContext[scheduler_pb2.ReserveRequest, scheduler_pb2.ReserveResponse]
RefusalContext = grpc.aio.ServicerContext[scheduler_pb2.NoteRefusalRequest, scheduler_pb2.NoteRefusalResponse]
ClaimContext = grpc.aio.ServicerContext[scheduler_pb2.ClaimRequest, scheduler_pb2.ClaimResponse]
OrgContext = grpc.aio.ServicerContext[scheduler_pb2.GetOrgRequest, scheduler_pb2.GetOrgResponse]


def add_services(server: grpc.aio.Server, scheduler: Scheduler) -> None:
    """Adds the services, health, reflection and channelz."""
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(scheduler), server)
    batch_pb2_grpc.add_BatchServiceServicer_to_server(BatchServicer(scheduler.files, scheduler.batches), server)
    rpc.add_standard_services(server, SERVICES, internal=True)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Place, Reserve, Claim, Finish, Attach, Authenticate, GetOrg, NoteRefusal."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: PlaceContext) -> None:  # type: ignore[override]  # writes itself
        """See scheduler.proto."""
        try:
            # Written, not yielded: a generator that is cancelled at a yield would clean up only when it is collected.
            await self._place(self._admit(request, context), context)
        except StatusError as error:
            await errors.abort(context, error)

    async def _place(self, waiter: Waiter, context: PlaceContext) -> None:
        scheduler = self._scheduler
        scheduler.waiting.add(waiter)
        # A cancellation that gRPC fails to raise in here still ends the wait.
        context.add_done_callback(lambda _: waiter.settle(gone()))  # type: ignore[arg-type]  # the stubs want a class for it
        enqueuing = asyncio.ensure_future(scheduler.keeper.enqueue(waiter))
        reason: str | None = "withdrawn"
        try:
            await asyncio.shield(enqueuing)
            scheduler.dispatcher.wake()
            scheduler.keeper.ask_position()
            lease = await self._wait(waiter, context)
            reason = None
        except StatusError as error:
            reason = None if error.reason in ("STOPPING", "SUPERSEDED", "SHED") else error.reason.lower()
            raise
        finally:
            scheduler.waiting.remove(waiter)
            if reason is not None:
                scheduler.errand(self._withdraw(waiter, enqueuing, reason))
        ticket = waiter.ticket
        trace = exemplar(tracing.current().trace_id)
        scheduler.metrics.queue_wait.labels(ticket.model, class_label(ticket.latency_class)).observe(lease.queued_seconds, trace)
        await context.write(self._placed(lease, waiter))

    async def _wait(self, waiter: Waiter, context: PlaceContext) -> Lease:
        try:
            async with asyncio.timeout(waiter.deadline_at - time.monotonic()):
                while isinstance(news := await waiter.next(), Position):
                    queued = scheduler_pb2.Queued(position=news.ahead, eta_seconds=news.eta_seconds)
                    await context.write(scheduler_pb2.PlaceResponse(queued=queued))
                return news
        except TimeoutError:
            raise deadline_passed() from None

    async def _withdraw(self, waiter: Waiter, enqueuing: asyncio.Future[None], reason: str) -> None:
        await enqueuing  # Or it would be queued behind our back.
        if not waiter.enqueued or not await self._scheduler.ledger.withdraw(waiter.ticket.request_id, waiter.holder, reason):
            return
        self._scheduler.room()
        self._scheduler.metrics.finished.labels(waiter.ticket.model, class_label(waiter.ticket.latency_class), reason).inc()

    def _admit(self, request: scheduler_pb2.PlaceRequest, context: PlaceContext) -> Waiter:
        """A waiter for a ticket that makes sense, has time left, and could be served."""
        scheduler, ticket = self._scheduler, read_place(request)
        if request.lost_epoch % keys.EPOCHS_PER_TRY == 0:  # What runs already goes on, whatever has been set since.
            ticket = self._allowed([ticket])[0]
        promised = scheduler.orgs.policy.classes[ticket.latency_class]
        seconds = request.ticket.deadline_seconds or promised.deadline_seconds or scheduler.options.default_deadline_seconds
        seconds = min(seconds, context.time_remaining() or seconds)
        if seconds <= 0:
            raise deadline_passed()
        problem = impossible(ticket, scheduler.registry.known(time.monotonic()), scheduler.orgs.get(ticket.org))
        if problem is not None:
            raise invalid(*problem)
        unserved = scheduler.keeper.unserved(ticket)
        if unserved is not None:
            raise unserved
        return Waiter(
            ticket,
            scheduler.new_holder(),
            deadline_at=time.monotonic() + seconds,
            lost_epoch=request.lost_epoch,
            tell_seconds=scheduler.options.tell_seconds,
        )

    def _allowed(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Tickets of one org as its policy has them now. PERMISSION_DENIED for a model; RESOURCE_EXHAUSTED: they never fit its quota."""
        scheduler = self._scheduler
        lowered = [scheduler.orgs.allowed(ticket) for ticket in tickets]
        error = quota.too_large(lowered, scheduler.orgs.get(lowered[0].org))
        if error is not None:
            scheduler.metrics.quota_refused.labels("size").inc()
            raise error
        return lowered

    async def Reserve(self, request: scheduler_pb2.ReserveRequest, context: ReserveContext) -> scheduler_pb2.ReserveResponse:
        """See scheduler.proto."""
        try:
            tickets = self._allowed(read_reserve(request))
            state = await self._scheduler.keeper.reserve(tickets)
        except StatusError as error:
            await errors.abort(context, error)
        return scheduler_pb2.ReserveResponse(quota=state.to_proto())

    def _placed(self, lease: Lease, waiter: Waiter) -> scheduler_pb2.PlaceResponse:
        promised = self._scheduler.orgs.policy.classes[waiter.ticket.latency_class]
        return scheduler_pb2.PlaceResponse(
            placed=scheduler_pb2.Lease(
                request_id=lease.request_id,
                epoch=lease.epoch,
                worker_id=lease.worker_id,
                incarnation=lease.incarnation,
                address=lease.address,
                queued_seconds=lease.queued_seconds,
                ttft_target_seconds=promised.ttft_target_ms / 1000,
                tpot_target_seconds=promised.tpot_target_ms / 1000,
                quota=waiter.quota.to_proto(),
                decision=decision_to_proto(lease.decision),
                latency_class=types_pb2.LatencyClass.ValueType(waiter.ticket.latency_class),
            )
        )

    async def Claim(self, request: scheduler_pb2.ClaimRequest, context: ClaimContext) -> scheduler_pb2.ClaimResponse:
        """See scheduler.proto."""
        try:
            check_claim(request)
            claim = Claim(request.request_id, request.seed, request.model, request.model_version)
            made = await self._scheduler.claims.make(
                request.org, request.key_hash.hex(), request.digest.hex(), claim, request.deadline_seconds
            )  # fmt: skip
        except StatusError as error:
            await errors.abort(context, error)
        return scheduler_pb2.ClaimResponse(
            request_id=made.first.request_id,
            seed=made.first.seed,
            model=made.first.model,
            model_version=made.first.version,
            lost_epoch=made.lost_epoch,
            created_unix_seconds=made.created_at,
        )

    async def Finish(self, request: scheduler_pb2.FinishRequest, context: FinishContext) -> scheduler_pb2.FinishResponse:
        """See scheduler.proto."""
        try:
            check_id("request_id", request.request_id)
            record = self._scheduler.explanations.keep(request.request_id, request.explanation) if request.HasField("explanation") else None
            ended, line = await self._scheduler.ledger.finish(request.request_id, request.epoch, read_settlement(request), record)
        except StatusError as error:
            await errors.abort(context, error)
        if ended:
            self._scheduler.memory.backlog.ended(request.request_id)
            self._scheduler.room()
            self._scheduler.metrics.ended(line, finish_label(request))
        return scheduler_pb2.FinishResponse(ended=ended)

    async def Authenticate(
        self, request: scheduler_pb2.AuthenticateRequest, context: AuthenticateContext
    ) -> scheduler_pb2.AuthenticateResponse:
        """See scheduler.proto."""
        try:
            info = await self._scheduler.api_keys.authenticate(request.key_hash)
        except StatusError as error:
            await errors.abort(context, error)
        return scheduler_pb2.AuthenticateResponse(key_id=info.key_id, org=info.org, roles=info.roles, expires_at=info.expires_at)

    async def GetOrg(self, request: scheduler_pb2.GetOrgRequest, context: OrgContext) -> scheduler_pb2.GetOrgResponse:
        """See scheduler.proto."""
        try:
            check_id("org", request.org)
        except StatusError as error:
            await errors.abort(context, error)
        return scheduler_pb2.GetOrgResponse(policy=org_to_proto(self._scheduler.orgs.get(request.org)))

    async def NoteRefusal(self, request: scheduler_pb2.NoteRefusalRequest, context: RefusalContext) -> scheduler_pb2.NoteRefusalResponse:
        """See scheduler.proto."""
        try:
            check_id("actor", request.actor)
            check_id("act", request.act)
        except StatusError as error:
            await errors.abort(context, error)
        await self._scheduler.audit.denied(Act(request.actor, request.act, ""))
        return scheduler_pb2.NoteRefusalResponse()

    async def Attach(  # type: ignore[override]  # writes itself
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachRequest], context: AttachContext
    ) -> None:
        """See scheduler.proto."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        attachment = Attachment(self._scheduler, context)
        try:
            await attachment.register(first.register)
            async for request in request_iterator:
                if request.HasField("register"):
                    await attachment.register(request.register)
                else:
                    await attachment.beat(request.heartbeat)
        except StatusError as error:
            await errors.abort(context, error)
        finally:
            attachment.end()


def gone() -> StatusError:
    """For a caller that doesn't listen any more."""
    return StatusError(Code.CANCELLED, "the caller has gone", reason="WITHDRAWN")
