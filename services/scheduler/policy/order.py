"""The order of waiting tickets: class first, then arrival, over one fifo per (model, class, org). Knows no worker."""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

REALTIME, STANDARD, BATCH = 1, 2, 3


@dataclass(frozen=True)
class Ticket:
    """A waiting request, as far as placing it needs. `order` is given once, at the first arrival, and never changes."""

    request_id: str
    org: str
    latency_class: int
    model: str
    model_version: str
    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    order: int = 0
    num_delivered_tokens: int = 0
    excluded_workers: frozenset[str] = frozenset()
    asked_seconds: float = 0.0
    """Since its gateway asked, and named the workers that it can't reach."""


def arrange(fifos: Iterable[Sequence[Ticket]]) -> Iterator[Ticket]:
    """All tickets in the order in which they should be placed. Each fifo must be in arrival order itself."""
    return heapq.merge(*fifos, key=lambda ticket: (ticket.latency_class, ticket.order))


def positions(fifos: Mapping[str, Sequence[tuple[str, int]]]) -> dict[str, int]:
    """Tickets ahead of each in one (model, class), from 0. `fifos`: org -> (request id, order), in arrival order."""
    line = heapq.merge(*fifos.values(), key=lambda entry: entry[1])
    return {request_id: position for position, (request_id, _) in enumerate(line)}


class Pace:
    """Placements per second of one (model, class), averaged over about half a minute. Gives the expected wait."""

    WINDOW_SECONDS = 30.0

    def __init__(self, now: float) -> None:
        self._started = now
        self._updated = now
        self._count = 0.0

    def placed(self, now: float) -> None:
        """One ticket has left the line."""
        self._decay(now)
        self._count += 1

    def eta_seconds(self, position: int, now: float) -> float:
        """Seconds until the ticket at `position` is placed; -1 while nothing has been placed lately."""
        self._decay(now)
        if self._count < 0.5:
            return -1.0
        # A young window has seen less than it would hold: without this a first burst looks slow.
        seen = max(1.0, min(now - self._started, self.WINDOW_SECONDS))
        return (position + 1) * seen / self._count

    def _decay(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)
        self._count *= math.exp(-elapsed / self.WINDOW_SECONDS)
        self._updated = now
