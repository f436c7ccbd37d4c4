"""Keeps house, once a second: speaks for the waiting streams, sweeps, refuses what nobody serves, tells positions."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from services.common import log
from services.common.errors import Code, StatusError, unavailable
from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.ledger import Ended, Expired, Finished, Full, Lease, Ledger, News, Quarantined, Superseded, Survey
from services.scheduler.metrics import Metrics, class_label
from services.scheduler.orgs import Orgs
from services.scheduler.policy.fleet import Worker, impossible
from services.scheduler.policy.order import Ticket, positions
from services.scheduler.policy.pace import Pace, retry_seconds
from services.scheduler.policy.rules import Rules
from services.scheduler.quota import Over, QuotaState, refusal
from services.scheduler.registry import Registry
from services.scheduler.uptime import Uptime
from services.scheduler.waiting import Position, Waiter, Waiting, deadline_passed, superseded

LOG = log.get(__name__)
_SOON_SECONDS = 0.25
_GAP_SECONDS = 2.0  # beyond a round's own time: so long this process was stopped, or as good as


class Keeper:
    """Everything here is repeated, so it may fail at any time: the next round does what this one could not."""

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        rules: Callable[[], Rules],
        waiting: Waiting,
        metrics: Metrics,
        orgs: Orgs,
        *,
        poll_seconds: float,
        no_worker_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._rules = rules
        self._waiting = waiting
        self._metrics = metrics
        self._orgs = orgs
        self._poll_seconds = poll_seconds
        self._no_worker_seconds = no_worker_seconds
        self._uptime = Uptime(time.monotonic(), poll_seconds + _GAP_SECONDS)
        self._random = random.Random()  # noqa: S311  # it scatters retries
        self._paces: dict[str, Pace] = {}
        self._asked = asyncio.Event()
        self.survey = Survey({}, {}, 0)

    async def run(self) -> None:
        """For ever."""
        while True:
            with suppress(StatusError):  # Redis is away.
                await self._keep_house()
            self._uptime.since(time.monotonic())
            self._refuse_unserved()
            await asyncio.sleep(self._poll_seconds)

    async def tell_positions(self) -> None:
        """For ever: to every waiting stream once a second, sooner when one has just come."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._asked.wait()
            await asyncio.sleep(min(_SOON_SECONDS, self._poll_seconds))  # Many come together; most are placed meanwhile.
            self._asked.clear()
            try:
                await self._tell_positions()
            except StatusError:  # Redis is away. Who has a place and hasn't heard so would take this scheduler for silent.
                for waiter in self._waiting:
                    waiter.placate()

    def ask_position(self) -> None:
        """A stream has come and would like to know where it stands."""
        self._asked.set()

    async def enqueue(self, waiter: Waiter) -> None:
        """Queues a waiter's ticket, for the first time or because Redis has lost it, and settles the waiter if that ends the wait."""
        org = self._orgs.get(waiter.ticket.org)
        answer = await self._ledger.enqueue(
            waiter.ticket,
            waiter.holder,
            org,
            deadline_seconds=waiter.deadline_at - time.monotonic(),
            lost_epoch=waiter.lost_epoch,
        )
        match answer:
            case Lease():
                waiter.quota = answer.quota
                waiter.settle(answer)
            case Over():
                waiter.settle(self._over([waiter.ticket], org, answer))
            case Full():
                self._refuse(waiter, answer.num_waiting, shed=answer.shed)
            case Superseded():
                waiter.settle(superseded())
            case Expired():
                waiter.settle(deadline_passed())
            case Quarantined():
                words = "workers die of this request, twice at the same output position: it won't be placed again; please report its id"
                waiter.settle(StatusError(Code.INVALID_ARGUMENT, words, reason="QUARANTINED"))
            case Finished():
                waiter.settle(StatusError(Code.ALREADY_EXISTS, f"request {waiter.ticket.request_id} has ended: use a new id"))
            case _:
                waiter.quota = answer.quota
                waiter.queued(answer.order, time.monotonic() + answer.left_seconds)

    async def reserve(self, tickets: Sequence[Ticket]) -> QuotaState:
        """Takes the quota of all these tickets of one org; RESOURCE_EXHAUSTED where not all fit, and none has taken anything."""
        org = self._orgs.get(tickets[0].org)
        answer = await self._ledger.reserve(tickets, org)
        if isinstance(answer, Over):
            raise self._over(tickets, org, answer)
        return answer

    def _over(self, tickets: Sequence[Ticket], org: OrgPolicy, over: Over) -> StatusError:
        for kind in over.kinds:
            self._metrics.quota_refused.labels(kind).inc()
        return refusal(tickets, org, over)

    def left(self, line: str) -> None:
        """A ticket has left its line, here or elsewhere."""
        now = time.monotonic()
        self._paces.setdefault(line, Pace(now)).placed(now)

    def shed(self, request_id: str, num_waiting: int) -> None:
        """A ticket was put out of the full queue, here or elsewhere; its stream is told if it is here."""
        waiter = self._waiting.get(request_id)
        if waiter is not None and not waiter.settled:
            self._refuse(waiter, num_waiting, shed=True)

    def unserved(self, ticket: Ticket) -> StatusError | None:
        """UNAVAILABLE if no worker has served the ticket's model for too long. One that has just started, or woken, doesn't know yet."""
        now = time.monotonic()
        served_at = self._registry.served_at(ticket, now)
        if now - max(served_at or 0.0, self._uptime.since(now)) <= self._no_worker_seconds:
            return None
        what = f"{ticket.model} in version {ticket.model_version}" if ticket.model_version else ticket.model
        since = "" if served_at is None else f" for {now - served_at:.0f} s"
        return unavailable(f"no worker serves {what}{since}: start one, or try again", 5.0, "NO_WORKER")

    async def _keep_house(self) -> None:
        for news in await self._ledger.touch([(w.ticket.request_id, w.holder) for w in self._waiting if w.enqueued]):
            await self._hear(news)
        for ended in await self._ledger.sweep():
            self._report(ended)
        self.survey = await self._ledger.survey()
        now = time.monotonic()
        for (model, version), age in self.survey.serving.items():
            self._registry.note_served(model, version, now - age)

    async def _hear(self, news: News) -> None:
        waiter = self._waiting.get(news.request_id)
        if waiter is None or waiter.settled:
            return
        if news.lease is not None:
            waiter.settle(news.lease)
        elif news.kind == "superseded":
            waiter.settle(superseded())
        else:
            await self.enqueue(waiter)

    def _report(self, ended: Ended) -> None:
        LOG.info("swept", request_id=ended.request_id, reason=ended.reason, epoch=ended.epoch, worker=ended.worker_id,
                 num_output_tokens=ended.num_output_tokens)  # fmt: skip
        self._metrics.ended(ended.line, ended.reason)

    def _refuse_unserved(self) -> None:
        """Who can't be served, any more perhaps: it would keep those behind it in its org's queue from their turn, too."""
        workers = self._registry.known(time.monotonic())
        for waiter in self._waiting:
            error = self.unserved(waiter.ticket) or self._outgrown(waiter.ticket, workers)
            if error is not None:
                waiter.settle(error)

    def _outgrown(self, ticket: Ticket, workers: Sequence[Worker]) -> StatusError | None:
        """UNAVAILABLE where a worker could hold the ticket when it came, and none can now."""
        problem = impossible(ticket, workers, self._orgs.get(ticket.org))
        return None if problem is None else unavailable(f"no worker can take it any more: {problem[1]}", 5.0, "NO_WORKER")

    async def _tell_positions(self) -> None:
        lines = {keys.line_name(w.ticket.model, w.ticket.latency_class) for w in self._waiting if not w.settled}
        if not lines:
            return
        by_line: dict[str, dict[str, tuple[float, list[tuple[str, int]]]]] = {}
        for queue, entries in (await self._ledger.queued(lines)).items():
            model, latency_class, org = keys.parse_queue(queue)
            by_line.setdefault(keys.line_name(model, latency_class), {})[org] = entries
        now = time.monotonic()
        for line, fifos in by_line.items():
            pace = self._paces.setdefault(line, Pace(now))
            for request_id, position in positions(fifos, self._rules()).items():
                waiter = self._waiting.get(request_id)
                if waiter is not None:
                    waiter.move(Position(position, pace.eta_seconds(position, now)))

    def _refuse(self, waiter: Waiter, num_waiting: int, *, shed: bool) -> None:
        ticket, now = waiter.ticket, time.monotonic()
        paces = [pace for line, pace in self._paces.items() if keys.parse_line(line)[0] == ticket.model]
        seconds = retry_seconds(num_waiting, sum(pace.per_second(now) for pace in paces), self._random.random())
        words = f"{num_waiting} requests wait for {ticket.model} already"
        if shed:
            words += f", and a more urgent one has taken this {class_label(ticket.latency_class)} one's place"
        self._metrics.shed.labels(ticket.model, class_label(ticket.latency_class)).inc()
        waiter.settle(unavailable(f"{words}: try again later", seconds, "SHED" if shed else "QUEUE_FULL"))

    def lines(self) -> dict[tuple[str, int], tuple[int, float]]:
        """(model, class) -> (tickets waiting, seconds that the oldest has waited), as of the last survey."""
        lines: dict[tuple[str, int], tuple[int, float]] = {}
        for queue, (num, oldest) in self.survey.queues.items():
            model, latency_class, _ = keys.parse_queue(queue)
            so_far, oldest_so_far = lines.get((model, latency_class), (0, 0.0))
            lines[model, latency_class] = so_far + num, max(oldest, oldest_so_far)
        return lines
