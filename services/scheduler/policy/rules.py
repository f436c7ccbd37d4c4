"""By which rules the policy decides: what operators may set, and what the policy file promises to classes and orgs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.policy.classes import DEFAULT_CLASSES, ClassPolicy
from services.policy.org import OrgPolicy
from services.scheduler.policy.routing import SECONDS, Routing


@dataclass(frozen=True)
class Rules:
    """In force for one round.

    output_estimate: tokens per choice that a ticket is expected to need when its max_tokens says more.
    preemptible: whether engines take room from lower classes for a higher one, so that a full worker has room for it.
    routing: by what a worker is chosen among those that have room.
    distance: seconds to a region and back, from (a ticket's region, a worker's).
    fifo: arrival alone decides, whatever class or org: what the mesh is measured against.
    org: an org's policy, of which its weight and its share of a worker's cache count here.
    """

    output_estimate: int = 256
    preemptible: bool = True
    routing: Routing = SECONDS
    distance: Callable[[str, str], float] = lambda _here, _there: 0.0
    fifo: bool = False
    exclusion_seconds: float = 1.0
    classes: Mapping[int, ClassPolicy] = field(default_factory=lambda: DEFAULT_CLASSES)
    org: Callable[[str], OrgPolicy] = OrgPolicy
