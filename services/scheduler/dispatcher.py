"""Places waiting tickets: woken, it reads, lets the policy decide, commits. Any number of schedulers do so at once; losers look again."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

from services.common.errors import StatusError
from services.scheduler import keys
from services.scheduler.ledger import Lease, Ledger
from services.scheduler.metrics import Metrics, class_label
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.order import Order
from services.scheduler.policy.pick import Placement, plan
from services.scheduler.policy.rules import Rules
from services.scheduler.registry import Registry
from services.scheduler.spans import trace_placement

MAX_HEADS = 64
"""Tickets of one queue that are looked at in one round."""

ROUND_SECONDS = 0.002
"""Rounds begin no faster: most of a round's cost is reading how things stand, which is the same for one ticket and for ten."""


class Dispatcher:
    """`rules` gives those in force; `delivered` is told of each lease, and the name of its line."""

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        rules: Callable[[], Rules],
        metrics: Metrics,
        *,
        poll_seconds: float,
        delivered: Callable[[Lease, str], None],
        memory: Memory | None = None,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._rules = rules
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._delivered = delivered
        self._woken = asyncio.Event()
        self._memory = Memory() if memory is None else memory
        self._draw = random.Random().randrange  # noqa: S311  # it spreads placements

    def wake(self) -> None:
        """There is a new ticket, or room."""
        self._woken.set()

    async def run(self) -> None:
        """For ever."""
        began = 0.0
        while True:
            with suppress(TimeoutError):  # Look anyway: a wake-up from another scheduler may be lost.
                async with asyncio.timeout(self._poll_seconds):
                    await self._woken.wait()
            await asyncio.sleep(max(0.0, began + ROUND_SECONDS - time.monotonic()))
            self._woken.clear()
            began = time.monotonic()
            with suppress(StatusError):  # Redis is away; the next wake-up or poll tries again.
                while await self._place_some():
                    pass

    async def _place_some(self) -> bool:
        workers = self._registry.usable(time.monotonic())
        if not workers:
            return False
        rules = self._rules()
        view = await self._ledger.view(workers, MAX_HEADS, preemptible=rules.preemptible)
        self._memory.forget_the_gone()
        order = Order(view.fifos, rules, view.recent)
        placements = plan(order, view.workers, rules, self._memory, now=time.monotonic(), draw=self._draw)
        outcomes = await self._ledger.commit(placements, rules)
        for placement, outcome in zip(placements, outcomes, strict=True):
            self._report(placement, outcome)
        num_placed = sum(isinstance(outcome, Lease) for outcome in outcomes)
        num_seen = sum(len(fifo.tickets) for fifo in view.fifos)
        # Is there more? If others won every race, they look for more themselves; what came since has woken us.
        return num_placed > 0 and (num_seen > num_placed or any(fifo.cut for fifo in view.fifos))

    def _report(self, placement: Placement, outcome: Lease | str) -> None:
        if isinstance(outcome, str):
            self._metrics.decisions.labels(outcome).inc()
            return
        ticket = placement.ticket
        self._memory.committed(ticket, placement.worker, placement.num_new_tokens, time.monotonic())
        self._metrics.decisions.labels(placement.counts_on).inc()
        trace_placement(placement, outcome)
        self._metrics.placements.labels(ticket.model, class_label(ticket.latency_class)).inc()
        self._delivered(outcome, keys.line_name(ticket.model, ticket.latency_class))
