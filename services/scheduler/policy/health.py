"""Which workers get no new work for a while because they were in trouble: a gate that closes at once and opens late. Pure.

It is never a score: a worker is in or out, and those that are out still get what nobody else could take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.policy.node import SLOWDOWN_CELSIUS

QUIET_SECONDS = 3.0
"""A worker has to be sound for so long before it is trusted again: three heartbeats."""
COOLED_CELSIUS = 4.0
"""And so far below the temperature at which it slows itself down."""


@dataclass
class Gate:
    """By worker id."""

    _troubled_at: dict[str, float] = field(default_factory=dict)
    _hot: set[str] = field(default_factory=set)

    def note(self, worker_id: str, now: float, *, healthy: bool, celsius: float | None, slowdown_celsius: float = SLOWDOWN_CELSIUS) -> None:
        """A heartbeat has come."""
        if celsius is not None and celsius >= slowdown_celsius:
            self._hot.add(worker_id)
        elif celsius is None or celsius < slowdown_celsius - COOLED_CELSIUS:
            self._hot.discard(worker_id)
        if not healthy:
            self._troubled_at[worker_id] = now

    def is_closed(self, worker_id: str, now: float) -> bool:
        """Whether new work goes elsewhere while it can."""
        if worker_id in self._hot:
            return True
        troubled_at = self._troubled_at.get(worker_id)
        if troubled_at is None:
            return False
        if now - troubled_at < QUIET_SECONDS:
            return True
        del self._troubled_at[worker_id]
        return False

    def keep(self, workers: Mapping[str, object]) -> None:
        """Forgets all others."""
        self._hot &= workers.keys()
        for worker_id in self._troubled_at.keys() - workers.keys():
            del self._troubled_at[worker_id]
