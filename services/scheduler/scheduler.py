"""One scheduler: its parts, wired, and the tasks that run them. The gRPC faces in server.py call in here."""

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from services.common import log, process
from services.common.errors import Code, StatusError
from services.policy.watched import PolicyFile
from services.scheduler.affinity import Affinity
from services.scheduler.api_keys import ApiKeys
from services.scheduler.audit import Audit
from services.scheduler.batches import Batches, Swept
from services.scheduler.claims import Claims
from services.scheduler.dispatcher import Dispatcher
from services.scheduler.drains import Drains
from services.scheduler.explanations import Explanations
from services.scheduler.files import Caps, Files
from services.scheduler.keeper import Keeper
from services.scheduler.ledger import Lease, Ledger, Timing
from services.scheduler.metrics import Metrics, State
from services.scheduler.model_acts import ModelActs
from services.scheduler.orgs import Orgs
from services.scheduler.placer import Placer
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.routing import ROUTINGS
from services.scheduler.policy.rules import Rules
from services.scheduler.registry import Registry
from services.scheduler.settings import SchedulerSettings
from services.scheduler.store import Store
from services.scheduler.usage import Usage
from services.scheduler.waiting import Waiting

LOG = log.get(__name__)


@dataclass(frozen=True)
class Options:
    """How one scheduler behaves. Times in seconds."""

    scheduler_id: str
    max_queued: int = 4096
    no_worker_seconds: float = 5.0
    liveness_seconds: float = 3.0
    poll_seconds: float = 1.0
    tell_seconds: float = 1.0
    default_deadline_seconds: float = 600.0
    peer_delay_seconds: float = 0.005
    """After another scheduler's event: it acts first, so that commits seldom race."""
    timing: Timing = field(default_factory=Timing)
    rules: Rules = field(default_factory=Rules)
    caps: Caps = field(default_factory=Caps)
    prefetch: bool = True
    claim_seconds: float = 3600.0
    max_claims: int = 10_000

    @classmethod
    def of(cls, settings: SchedulerSettings) -> "Options":
        """As the operator has set them."""
        return cls(
            scheduler_id=settings.scheduler_id,
            max_queued=settings.max_queued,
            no_worker_seconds=settings.no_worker_seconds,
            liveness_seconds=settings.liveness_seconds,
            poll_seconds=settings.poll_seconds,
            default_deadline_seconds=settings.default_deadline_seconds,
            timing=Timing(settings.stream_gone_seconds, settings.start_seconds, settings.lease_seconds),
            rules=Rules(
                settings.output_estimate_tokens,
                preemptible=settings.preemption,
                routing=ROUTINGS[settings.routing],
                distance=settings.distance,
                fifo=settings.queue_order == "arrival",
            ),
            caps=Caps(
                file=settings.max_file_bytes,
                org=settings.org_storage_bytes,
                all=settings.storage_bytes,
                keep_seconds=settings.file_retention_seconds,
            ),
            prefetch=settings.prefetch,
            claim_seconds=settings.idempotency_seconds,
            max_claims=settings.idempotency_keys,
        )


class Scheduler:
    """Start it, serve it, stop it, drain it. The store is the caller's to open and close."""

    def __init__(self, store: Store, options: Options, policy: PolicyFile | None = None) -> None:
        """Without a policy file nobody is limited."""
        self.options = options
        self.store = store
        self.orgs = Orgs(store, policy or PolicyFile(None))
        self.metrics = Metrics()
        self.drains = Drains(store)
        self.memory = Memory()
        self.registry = Registry(liveness_seconds=options.liveness_seconds, backlog=self.memory.backlog, drained=self.drains.covers)
        self.waiting = Waiting()
        # Drawn at each start: a restarted scheduler must not take its predecessor's streams and events for its own.
        self._instance = f"{options.scheduler_id}/{secrets.token_hex(4)}"
        self.ledger = Ledger(store, self._instance, max_queued=options.max_queued, timing=options.timing)
        self.audit = Audit(store, self._instance)
        self.model_acts = ModelActs(store, self.registry, self._instance)
        self.api_keys = ApiKeys(store, self.audit)
        self.claims = Claims(store, keep_seconds=options.claim_seconds, most=options.max_claims)
        self.usage = Usage(store)
        self.explanations = Explanations(store)
        self.files = Files(store, options.caps)
        self.batches = Batches(store, options.caps)
        self.stored = Swept()
        self.keeper = Keeper(
            self.ledger, self.registry, self.rules, self.waiting, self.metrics, self.orgs,
            poll_seconds=options.poll_seconds, no_worker_seconds=options.no_worker_seconds,
        )  # fmt: skip
        self.dispatcher = Dispatcher(
            self.ledger, self.registry, self.rules, self.metrics,
            poll_seconds=options.poll_seconds, delivered=self.placed, memory=self.memory,
        )  # fmt: skip
        self.affinity = Affinity(store, self._instance)
        self.placer = Placer(
            self.affinity, self.registry, self.keeper.lines, self.model_acts, self.metrics, poll_seconds=options.poll_seconds
        )
        self.metrics.show(self._state())
        self.stopping = False
        self._holders = itertools.count(1)
        self._loops: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Starts the loops."""
        loops = [
            self.dispatcher.run(),
            self.keeper.run(),
            self.keeper.tell_positions(),
            self._listen(),
            self._watch_orgs(),
            self._sweep_files(),
            *([self.placer.run()] if self.options.prefetch else []),
        ]
        self._loops = [asyncio.create_task(loop) for loop in loops]

    async def run_until(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set. Raises what has ended one of the loops, if that comes first: better gone than half alive."""
        await process.until(stop, *self._loops)

    async def stop(self) -> None:
        """Sends the waiting streams to other schedulers, where they keep their places, and ends the loops."""
        self.stopping = True
        # Without a time to come back: the caller is to ask another scheduler at once.
        self.waiting.settle_all(StatusError(Code.UNAVAILABLE, "this scheduler is stopping: ask another", reason="STOPPING"))
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        with suppress(StatusError):  # Redis is away: its lease runs out.
            await self.affinity.resign()

    async def drain(self) -> None:
        """Waits for the last errands, when no call can send new ones."""
        await asyncio.gather(*self._errands)

    def rules(self) -> Rules:
        """Those in force now: the policy file may have changed, or an operator an org."""
        return replace(self.options.rules, classes=self.orgs.policy.classes, org=cache(self.orgs.get))

    def new_holder(self) -> str:
        """A name for a Place stream, unique in the mesh."""
        return f"{self._instance}/{next(self._holders)}"

    def room(self) -> None:
        """A worker may have more of it. Where nobody waits, here or by the last survey, there is nothing to look for."""
        if self.waiting or self.keeper.survey.queues:
            self.dispatcher.wake()

    def placed(self, lease: Lease, line: str) -> None:
        """A lease was committed, here or elsewhere."""
        self.keeper.left(line)
        self.waiting.deliver(lease)

    def errand(self, work: Coroutine[Any, Any, Any]) -> None:
        """Does something that must survive the call which asked for it. Redis being away is no error: sweeps see to the rest."""

        async def run() -> None:
            try:
                await work
            except StatusError:
                LOG.debug("errand_failed")

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def not_ready_reason(self) -> str | None:
        """For /ready."""
        if self.stopping:
            return "stopping"
        return "Redis is away" if self.store.is_away else None

    async def refresh(self) -> None:
        """Reads what operators have set. StatusError UNAVAILABLE while Redis is away."""
        await self.orgs.refresh()
        await self.drains.refresh()
        await self.model_acts.refresh()

    def _state(self) -> State:
        return State(
            lines=self.keeper.lines,
            waiting=self._waiting_by_model,
            workers_ready=lambda: self.registry.ready_by_model(time.monotonic()),
            heartbeat_ages=lambda: self.registry.heartbeat_ages(time.monotonic()),
            sharing_loads=lambda: self.placer.loads,
            num_leases=lambda: self.keeper.survey.num_leases,
            num_streams=lambda: len(self.waiting),
            redis_away=lambda: self.store.is_away,
            num_redis_failures=lambda: self.store.num_failures,
            policy_refused=lambda: bool(self.orgs.file.problem),
            num_policy_failures=lambda: self.orgs.file.num_failures,
            open_batches=lambda: self.stored.num_open,
            stored_bytes=lambda: self.stored.num_bytes,
        )

    def _waiting_by_model(self) -> dict[str, int]:
        """Zeros included, of models that have been served."""
        counts = Counter(waiter.ticket.model for waiter in self.waiting if not waiter.settled)
        return {model: counts[model] for model in {*self.registry.ready_by_model(time.monotonic()), *counts}}

    async def _watch_orgs(self) -> None:
        """Looks at the policy file and at what operators have set, in case another scheduler's word was lost."""
        while True:
            with suppress(StatusError):  # Redis is away.
                await self.refresh()
            self.orgs.file.look()
            await asyncio.sleep(self.options.poll_seconds)

    async def _sweep_files(self) -> None:
        """Takes out files and jobs whose time is over, and looks how much is stored."""
        while True:
            with suppress(StatusError):  # Redis is away.
                self.stored = await self.batches.sweep()
            await asyncio.sleep(self.options.poll_seconds)

    async def _listen(self) -> None:
        async for event in self.store.events():
            if event.get("from") == self._instance:
                continue
            if event["event"] == "placed":
                self.placed(Lease.parse(event["lease"]), event["line"])
            elif event["event"] == "shed":
                self.keeper.shed(event["request_id"], event["depth"])
            elif event["event"] == "orgs":
                self.errand(self.refresh())
            else:
                asyncio.get_running_loop().call_later(self.options.peer_delay_seconds, self.dispatcher.wake)
