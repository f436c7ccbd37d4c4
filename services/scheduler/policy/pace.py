"""How fast a queue drains, and what that tells those who wait or were refused. Time is passed in."""

import math

RETRY_SECONDS = (1.0, 30.0)
"""Bounds of what a refused caller is told."""
UNKNOWN_SECONDS = 5.0
"""What it is told while nothing drains."""


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

    def per_second(self, now: float) -> float:
        """Placements per second; 0 while nothing has been placed lately."""
        self._decay(now)
        if self._count < 0.5:
            return 0.0
        # A young window has seen less than it would hold: without this a first burst looks slow.
        return self._count / max(1.0, min(now - self._started, self.WINDOW_SECONDS))

    def eta_seconds(self, position: int, now: float) -> float:
        """Seconds until the ticket at `position` is placed; -1 while nothing has been placed lately."""
        per_second = self.per_second(now)
        return (position + 1) / per_second if per_second else -1.0

    def _decay(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)
        self._count *= math.exp(-elapsed / self.WINDOW_SECONDS)
        self._updated = now


def retry_seconds(num_waiting: int, per_second: float, spread: float) -> float:
    """When one who found so many waiting should come back. `spread`, 0 .. 1, scatters them by a quarter: not all at once again."""
    least, most = RETRY_SECONDS
    drained = num_waiting / per_second if per_second else UNKNOWN_SECONDS
    return min(max(drained, least), most) * (0.75 + spread / 2)
