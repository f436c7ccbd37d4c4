"""By when each of a request's tokens is due. Pure: seconds by the clock of Engine.step, which is the caller's."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Envelope:
    """Token i is due at arrival + TTFT target + i x TPOT target. Without a target there is no deadline.

    With a TPOT target alone each token is due so long after the one before, whenever that came.
    """

    arrival: float = 0.0  # at the gateway
    ttft_seconds: float = 0.0  # 0: no target
    tpot_seconds: float = 0.0  # 0: no target

    @property
    def first_due(self) -> float:
        """When the first token is due; without a target at once, so that whoever came first goes first."""
        return self.arrival + self.ttft_seconds

    def slack(self, index: int, now: float) -> float:
        """Seconds until output token `index`, a further one, is due; negative once it is late, infinite without a target."""
        if not self.tpot_seconds:
            return math.inf
        if not self.ttft_seconds:
            return self.tpot_seconds
        return self.first_due + index * self.tpot_seconds - now
