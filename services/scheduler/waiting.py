"""The Place streams that wait at this scheduler. Each waiter learns its position and, once, how its wait ended."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from services.common.errors import Code, StatusError
from services.scheduler.ledger import Lease
from services.scheduler.policy.order import Ticket
from services.scheduler.quota import UNKNOWN


@dataclass(frozen=True)
class Position:
    """Tickets ahead, and the expected wait in seconds (negative: no estimate)."""

    ahead: int
    eta_seconds: float


class Waiter:
    """One Place stream. `holder` tells it from other streams of the same request, here or elsewhere."""

    def __init__(self, ticket: Ticket, holder: str, *, deadline_at: float, lost_epoch: int = 0, tell_seconds: float = 1.0) -> None:
        self.ticket = ticket
        self.holder = holder
        self.deadline_at = deadline_at
        self.lost_epoch = lost_epoch
        self.enqueued = False
        self.quota = UNKNOWN
        """Where the org stood when this ticket was reserved."""
        self._tell_seconds = tell_seconds
        self._tell_at = 0.0
        self._position: Position | None = None
        self._told: int | None = None
        self._outcome: Lease | StatusError | None = None
        self._news = asyncio.Event()

    def queued(self, order: int, deadline_at: float) -> None:
        """Redis has the ticket, with this order and, by an earlier call perhaps, an earlier deadline (monotonic seconds)."""
        self.ticket = replace(self.ticket, order=order)
        self.deadline_at = min(self.deadline_at, deadline_at)
        self.enqueued = True

    def settle(self, outcome: Lease | StatusError) -> None:
        """The wait is over. Only the first outcome counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._news.set()

    def move(self, position: Position) -> None:
        """Where the ticket stands now."""
        self._position = position
        if self._is_news(position):  # a thousand streams needn't wake for nothing
            self._news.set()

    def placate(self) -> None:
        """It has a place, though nobody can say which: told where nothing was told before."""
        if self.enqueued and self._position is None:
            self.move(Position(0, -1.0))

    @property
    def settled(self) -> bool:
        """Whether the wait is over."""
        return self._outcome is not None

    async def next(self) -> Lease | Position:
        """The lease, or a position that is news, at most one each `tell_seconds`. Raises the StatusError that ended the wait."""
        while True:
            if isinstance(self._outcome, StatusError):
                raise self._outcome
            if self._outcome is not None:
                return self._outcome
            unsaid = self._is_news(self._position)
            pause = self._tell_at - time.monotonic()
            if self._position is not None and unsaid and pause <= 0:
                self._told, self._tell_at = self._position.ahead, time.monotonic() + self._tell_seconds
                return self._position
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause if unsaid else None):
                    await self._news.wait()

    def _is_news(self, position: Position | None) -> bool:
        """Far behind, a few places mean nothing: to tell a thousand streams of each would cost more than to place them."""
        if position is None or self._told is None:
            return position is not None
        return abs(position.ahead - self._told) > self._told // 10


class Waiting:
    """By request id. The newest stream of a request is the one that counts."""

    def __init__(self) -> None:
        self._waiters: dict[str, Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(list(self._waiters.values()))

    def add(self, waiter: Waiter) -> None:
        """A stream has come; an older one for the same request ends."""
        older = self._waiters.get(waiter.ticket.request_id)
        if older is not None:
            older.settle(superseded())
        self._waiters[waiter.ticket.request_id] = waiter

    def remove(self, waiter: Waiter) -> None:
        """A stream has ended."""
        if self._waiters.get(waiter.ticket.request_id) is waiter:
            del self._waiters[waiter.ticket.request_id]

    def get(self, request_id: str) -> Waiter | None:
        """The stream that waits for this request here."""
        return self._waiters.get(request_id)

    def deliver(self, lease: Lease) -> bool:
        """Gives a lease to its stream. False if that isn't here."""
        waiter = self._waiters.get(lease.request_id)
        if waiter is None:
            return False
        waiter.settle(lease)
        return True

    def settle_all(self, error: StatusError) -> None:
        """Ends every wait."""
        for waiter in self:
            waiter.settle(error)


def deadline_passed() -> StatusError:
    """For a request that waited too long."""
    return StatusError(Code.DEADLINE_EXCEEDED, "the deadline passed while the request was queued", reason="DEADLINE")


def superseded() -> StatusError:
    """For a stream whose request has a newer one."""
    return StatusError(Code.ABORTED, "a newer call for this request, or with its idempotency key, has taken over", reason="SUPERSEDED")
