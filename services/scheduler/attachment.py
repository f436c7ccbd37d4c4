"""One worker's Attach stream: who it is, its heartbeats, and what it is told."""

import asyncio
import time
from contextlib import suppress

import grpc

from forebay.v1 import scheduler_pb2
from services.common import log
from services.common.errors import Code, StatusError, invalid
from services.scheduler.ledger import Held
from services.scheduler.model_acts import pins_message
from services.scheduler.registry import as_worker
from services.scheduler.scheduler import Scheduler

LOG = log.get(__name__)

AttachContext = grpc.aio.ServicerContext[scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse]


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
