"""What a latency class gets: its weight in the queue, its targets, its deadline."""

from collections.abc import Mapping
from dataclasses import dataclass

REALTIME, STANDARD, BATCH = 1, 2, 3
CLASS_NAMES: Mapping[str, int] = {"realtime": REALTIME, "standard": STANDARD, "batch": BATCH}
"""Names in the policy file -> numbers of forebay.v1.LatencyClass."""


@dataclass(frozen=True)
class ClassPolicy:
    """One class. Targets in milliseconds, 0: none."""

    weight: float
    """Of a ticket that has just come, against the other classes'."""
    age_seconds: float
    """A ticket that has waited so long weighs twice as much, and again for each such time."""
    floor_share: float = 0.0
    """Share of the tokens placed of a model that the class keeps while it has work, whatever the others want, 0 .. 1."""
    ttft_target_ms: float = 0.0
    tpot_target_ms: float = 0.0
    deadline_seconds: float = 0.0
    """Of requests that come without one; 0: the service's default."""


DEFAULT_CLASSES: Mapping[int, ClassPolicy] = {
    REALTIME: ClassPolicy(weight=10, age_seconds=60, floor_share=0.5, ttft_target_ms=200, tpot_target_ms=50),
    STANDARD: ClassPolicy(weight=1, age_seconds=16, floor_share=0.2, ttft_target_ms=2_000, tpot_target_ms=200),
    BATCH: ClassPolicy(weight=0.1, age_seconds=8, floor_share=0.05),
}
"""A standard and a batch ticket outweigh a fresh realtime one after 53 s. Realtime hardly ages, or its overload would outrun them."""
