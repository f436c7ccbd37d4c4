"""What operators promise to each class and each org. Plain data: whoever reads it from a file fills it in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

REALTIME, STANDARD, BATCH = 1, 2, 3


@dataclass(frozen=True)
class ClassRules:
    """How one latency class is served.

    weight: over 0; doubles with each `age_seconds` (over 0) that a ticket waits.
    floor_share: 0 .. 1, of the tokens placed of one model, for as long as the class has work.
    ttft_target, tpot_target: seconds to the first token and to each further one; 0: none.
    """

    weight: float
    age_seconds: float
    floor_share: float
    ttft_target: float = 0.0
    tpot_target: float = 0.0


DEFAULT_CLASSES: Mapping[int, ClassRules] = {
    REALTIME: ClassRules(10.0, 60.0, 0.5, ttft_target=0.2, tpot_target=0.05),
    STANDARD: ClassRules(1.0, 16.0, 0.2, ttft_target=1.0, tpot_target=0.1),
    BATCH: ClassRules(0.1, 8.0, 0.05),
}
"""A standard and a batch ticket outweigh a fresh realtime one after 53 s. Realtime hardly ages, or its overload would outrun them."""


@dataclass(frozen=True)
class OrgShare:
    """What one org may have beside others. Its tokens are divided by `weight` (over 0); `kv_share`, over 0 .. 1: of one worker's blocks."""

    weight: float = 1.0
    kv_share: float = 1.0


def equal_shares(org: str) -> OrgShare:  # noqa: ARG001  # the same for all
    """For a mesh without promises to single orgs."""
    return OrgShare()


@dataclass(frozen=True)
class Rules:
    """What operators may set.

    output_estimate: tokens per choice that a ticket is expected to need when its max_tokens says more.
    preemptible: whether engines take room from lower classes for a higher one, so that a full worker has room for it.
    fifo: arrival alone decides, whatever class or org: what the mesh is measured against.
    """

    output_estimate: int = 256
    preemptible: bool = True
    fifo: bool = False
    exclusion_seconds: float = 1.0
    classes: Mapping[int, ClassRules] = field(default_factory=lambda: DEFAULT_CLASSES)
    share_of: Callable[[str], OrgShare] = equal_shares
