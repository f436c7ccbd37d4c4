"""SchedulerService, and all services on one server: protos in, protos out. What happens is decided elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from forebay.v1 import admin_pb2_grpc, batch_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common import errors, log, rpc, tracing
from services.common.errors import Code, StatusError, invalid
from services.common.metrics import exemplar
from services.scheduler import keys, quota
from services.scheduler.admin import AdminServicer
from services.scheduler.batch_server import BatchServicer
from services.scheduler.claims import Claim
from services.scheduler.ledger import Held, Lease
from services.scheduler.metrics import class_label, finish_label
from services.scheduler.model_acts import pins_message
from services.scheduler.policy.fleet import impossible
from services.scheduler.policy.order import Ticket
from services.scheduler.registry import as_worker
from services.scheduler.scheduler import Scheduler
from services.scheduler.waiting import Position, Waiter, deadline_passed
from services.scheduler.wire import check_claim, check_hashes, check_id, decision_to_proto, org_to_proto, read_settlement

LOG = log.get(__name__)
MAX_REGION = 64
MAX_TRACEPARENT = 55
"""Characters of a W3C traceparent."""
SERVICES = ["forebay.v1.SchedulerService", "forebay.v1.AdminService", "forebay.v1.BatchService"]
CALLERS = {"/forebay.v1.SchedulerService/Attach": "worker", "/forebay.": "gateway"}
"""The role that may call what, where certificates tell it."""

PlaceContext = grpc.aio.ServicerContext[scheduler_pb2.PlaceRequest, scheduler_pb2.PlaceResponse]
FinishContext = grpc.aio.ServicerContext[scheduler_pb2.FinishRequest, scheduler_pb2.FinishResponse]
AuthenticateContext = grpc.aio.ServicerContext[scheduler_pb2.AuthenticateRequest, scheduler_pb2.AuthenticateResponse]
ClaimContext = grpc.aio.ServicerContext[scheduler_pb2.ClaimRequest, scheduler_pb2.ClaimResponse]
OrgContext = grpc.aio.ServicerContext[scheduler_pb2.GetOrgRequest, scheduler_pb2.GetOrgResponse]
AttachContext = grpc.aio.ServicerContext[scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse]


def add_services(server: grpc.aio.Server, scheduler: Scheduler) -> None:
    """Adds the services, health, reflection and channelz."""
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(scheduler), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(scheduler), server)
    batch_pb2_grpc.add_BatchServiceServicer_to_server(BatchServicer(scheduler.files, scheduler.batches), server)
    rpc.add_standard_services(server, SERVICES, internal=True)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Place, Claim, Finish, Attach, Authenticate, GetOrg."""

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
        scheduler, ticket = self._scheduler, read_ticket(request)
        promised = scheduler.orgs.policy.classes[ticket.latency_class]
        seconds = request.ticket.deadline_seconds or promised.deadline_seconds or scheduler.options.default_deadline_seconds
        seconds = min(seconds, context.time_remaining() or seconds)
        if seconds <= 0:
            raise deadline_passed()
        if request.lost_epoch % keys.EPOCHS_PER_TRY == 0:  # What runs already goes on, whatever has been set since.
            self._check_org(ticket)
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

    def _check_org(self, ticket: Ticket) -> None:
        scheduler = self._scheduler
        scheduler.orgs.check(ticket)
        error = quota.too_large(ticket, scheduler.orgs.get(ticket.org))
        if error is not None:
            scheduler.metrics.quota_refused.labels("size").inc()
            raise error

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


class Attachment:
    """One Attach stream."""

    def __init__(self, scheduler: Scheduler, context: AttachContext) -> None:
        self._scheduler = scheduler
        self._context = context
        self._registration = scheduler_pb2.Register()
        self._stored = False
        """Whether Redis knows this incarnation; it may be away when the worker comes."""
        self._writing = asyncio.Lock()
        """gRPC takes one message at a time, and operators' acts come between heartbeats."""

    async def send(self, response: scheduler_pb2.AttachResponse) -> None:
        """Writes to the worker."""
        async with self._writing:
            await self._context.write(response)

    async def register(self, registration: scheduler_pb2.Register) -> None:
        """The worker says who it is and what it serves; again when that changes."""
        check_registration(registration)
        self._registration = registration
        await self._store()
        self._scheduler.registry.attach(registration, self, time.monotonic())
        self._scheduler.model_acts.attach(registration.worker_id, self, self.send)
        LOG.info("worker_attached", worker=registration.worker_id, incarnation=registration.incarnation, address=registration.address)
        await self.send(
            scheduler_pb2.AttachResponse(registered=scheduler_pb2.Registered(scheduler_id=self._scheduler.options.scheduler_id))
        )
        self._scheduler.dispatcher.wake()

    async def beat(self, heartbeat: scheduler_pb2.Heartbeat) -> None:
        """Takes a heartbeat in, and tells the worker which of its leases are none."""
        worker_id = self._registration.worker_id
        if not self._scheduler.registry.beat(worker_id, self, heartbeat, time.monotonic()):
            raise StatusError(Code.ABORTED, f"a newer stream of worker {worker_id} has taken over", reason="SUPERSEDED")
        drained = self._scheduler.drains.covers(self._registration)
        if drained != heartbeat.drained:
            await self.send(scheduler_pb2.AttachResponse(drain=scheduler_pb2.Drain(drain=drained)))
        self._scheduler.model_acts.hear(worker_id, heartbeat.outcomes)
        if (pins := self._scheduler.model_acts.pins_of(self._registration)) != list(heartbeat.pins):
            await self.send(pins_message(pins))
        try:
            revoked = await self._report(heartbeat)
        except StatusError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            return  # Redis is away. The streams of this worker go on; so does its life here.
        if revoked:
            leases = [scheduler_pb2.LeaseProgress(request_id=request_id, epoch=epoch) for request_id, epoch in revoked]
            await self.send(scheduler_pb2.AttachResponse(revoke=scheduler_pb2.Revoke(leases=leases)))
        self._scheduler.room()

    def end(self) -> None:
        """The stream is over. Unless this scheduler is leaving or a newer stream is here, the worker is down for all."""
        r = self._registration
        self._scheduler.model_acts.detach(r.worker_id, self)
        if not self._scheduler.registry.detach(r.worker_id, self) or self._scheduler.stopping:
            return
        LOG.warning("worker_lost", worker=r.worker_id, incarnation=r.incarnation)
        self._scheduler.errand(self._scheduler.ledger.down(r.worker_id, r.incarnation))

    async def _store(self) -> None:
        with suppress(StatusError):  # Redis is away: at the next heartbeat then.
            await self._report_death()
            await self._scheduler.ledger.register(self._registration.worker_id, self._registration.incarnation)
            self._stored = True

    async def _report_death(self) -> None:
        """Before the new start is known to anybody, as those who wait for this are placed then."""
        died_with = [(entry.request_id, entry.epoch, entry.num_output_tokens) for entry in self._registration.died_with]
        for request_id, line in await self._scheduler.ledger.died(died_with) if died_with else ():
            LOG.error("quarantined", request_id=request_id, worker=self._registration.worker_id)
            self._scheduler.metrics.quarantine(line)

    async def _report(self, heartbeat: scheduler_pb2.Heartbeat) -> list[tuple[str, int]]:
        if not self._stored:
            await self._store()
        leases = [Held(lease.request_id, lease.epoch, lease.num_output_tokens, lease.num_blocks) for lease in heartbeat.leases]
        worker = as_worker(self._registration)
        revoked = await self._scheduler.ledger.heartbeat(worker, heartbeat.num_used_blocks, leases)
        if revoked is None:
            words = f"worker {worker.worker_id} has registered as another incarnation since: give each worker its own FOREBAY_WORKER_ID"
            raise StatusError(Code.FAILED_PRECONDITION, words, reason="OTHER_INCARNATION")
        return revoked


def read_ticket(request: scheduler_pb2.PlaceRequest) -> Ticket:
    """The policy's ticket. INVALID_ARGUMENT where a field makes no sense: the gateway has checked users' input before."""
    t = request.ticket
    for name in ("request_id", "org", "model"):
        check_id(f"ticket.{name}", getattr(t, name))
    if t.latency_class not in (types_pb2.LATENCY_CLASS_REALTIME, types_pb2.LATENCY_CLASS_STANDARD, types_pb2.LATENCY_CLASS_BATCH):
        raise invalid("ticket.latency_class", f"ticket.latency_class is {t.latency_class}; it must be realtime, standard or batch")
    for name, least in (("num_prompt_tokens", 1), ("max_tokens", 0), ("n", 1)):
        if getattr(t, name) < least:
            raise invalid(f"ticket.{name}", f"ticket.{name} is {getattr(t, name)}; it must be at least {least}")
    check_hashes(t)
    return Ticket(
        request_id=t.request_id,
        org=t.org,
        latency_class=t.latency_class,
        model=t.model,
        model_version=t.model_version,
        num_prompt_tokens=t.num_prompt_tokens,
        max_tokens=t.max_tokens,
        region=t.region[:MAX_REGION],
        n=t.n,
        num_delivered_tokens=request.num_delivered_tokens,
        excluded_workers=frozenset(request.excluded_workers),
        awaited=tuple((dead.worker_id, dead.incarnation) for dead in request.awaited),
        traceparent=t.traceparent[:MAX_TRACEPARENT],
        block_hashes=b"".join(t.block_hashes).hex(),
        hash_tokens=t.hash_tokens,
    )


def check_registration(r: scheduler_pb2.Register) -> None:
    """INVALID_ARGUMENT for a worker that can't be one."""
    for name in ("worker_id", "incarnation", "address"):
        if not getattr(r, name):
            raise invalid(f"register.{name}", f"register.{name} is empty; Attach begins with a Register that names it")
    if r.max_sequences < 1:
        raise invalid("register.max_sequences", f"register.max_sequences is {r.max_sequences}; it must be at least 1")
    for model in r.models:
        if model.loaded and min(model.block_size, model.num_blocks, model.max_model_len) < 1:
            raise invalid("register.models", f"{model.model} is loaded; its block_size, num_blocks and max_model_len must be at least 1")
        longest = model.max_call_tokens or model.max_model_len
        if model.loaded and longest > model.num_blocks * model.block_size:
            cache = f"its {model.num_blocks} blocks of {model.block_size}"
            raise invalid("register.models", f"{model.model}: its longest request is of {longest} tokens; {cache} can't hold one such")


def gone() -> StatusError:
    """For a caller that doesn't listen any more."""
    return StatusError(Code.CANCELLED, "the caller has gone", reason="WITHDRAWN")
