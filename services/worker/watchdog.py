"""When a step loop counts as stalled, and when as lost. Pure: times are arguments."""

from dataclasses import dataclass

STALL_SECONDS = 8.0
"""With work and without progress for this long, the worker takes no work and its streams go elsewhere."""

FIRST_STALL_SECONDS = 60.0
"""The same before the first step has ended: nothing tells yet how long steps are here."""

LONG_STEPS = 4.0
"""A step may take so many times as long as the longest that was seen or is foretold, should that be more."""

LOST = 15.0 / 8.0
"""Behind so many times the limit only a new process helps."""

PAUSE_SECONDS = 2.0
"""Looks are fractions of a second apart. Where one comes later than this, the process itself was stopped, and no step could end."""


@dataclass(frozen=True)
class Limit:
    """Seconds without progress until a loop counts as stalled."""

    seconds: float

    @classmethod
    def of(cls, longest_step_seconds: float) -> "Limit":
        """`longest_step_seconds`: seen or foretold; 0: none has ended yet."""
        return cls(max(STALL_SECONDS, LONG_STEPS * longest_step_seconds) if longest_step_seconds else FIRST_STALL_SECONDS)

    @property
    def lost_seconds(self) -> float:
        """Seconds without progress behind which the loop won't come back."""
        return LOST * self.seconds


class Pauses:
    """Finds the stretches in which this process did not run (SIGSTOP, a suspended host): they aren't the engine's fault."""

    def __init__(self, now: float) -> None:
        self._looked_at = now

    def look(self, now: float) -> float:
        """Seconds of a pause since the last look; 0 where there was none."""
        gap, self._looked_at = now - self._looked_at, now
        return gap if gap > PAUSE_SECONDS else 0.0
