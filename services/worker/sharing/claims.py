"""Whose turn it is for pages that aren't free: before each step of a device. Pure: the time is an argument.

One claim stands at a time, that of the weightiest waiting sequence (class, doubled as it waits): newcomers of the other models leave it
the pages that come free, so however busy they are, it gets them. Lower classes of any model give way to it at once. Where a model has
less than its fair share, its claims weigh more, and those above theirs give way in its own class, too, once it has waited for a moment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.worker.engine.admission import Cause, Want
from services.worker.sharing.arena import Arena

PATIENCE_SECONDS = 2.0
"""So long a sequence waits for pages to come free by themselves before others of its class give way to it."""

FAIR_WEIGHT = 8.0
"""By so much a claim outweighs those beyond a fair share: as three doublings would, less than a class."""


class Tenant(Protocol):
    """What an engine says of its need for pages, and gives up of them; see Engine."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_growing(self) -> int: ...
    def want(self, now: float) -> Want | None: ...
    def num_yieldable(self, latency_class: int, now: float) -> int: ...
    def give_way(self, num_blocks: int, latency_class: int, cause: Cause, now: float) -> int: ...


@dataclass(frozen=True)
class Resting:
    """A tenant whose weights aren't on the device: it can use no pages, but still gives up those that its sequences hold."""

    tenant: Tenant

    @property
    def has_work(self) -> bool:
        return self.tenant.has_work

    @property
    def num_growing(self) -> int:
        return 0

    def want(self, now: float) -> Want | None:  # noqa: ARG002
        return None

    def num_yieldable(self, latency_class: int, now: float) -> int:
        return self.tenant.num_yieldable(latency_class, now)

    def give_way(self, num_blocks: int, latency_class: int, cause: Cause, now: float) -> int:
        return self.tenant.give_way(num_blocks, latency_class, cause, now)


def settle(arena: Arena, tenants: Mapping[str, Tenant], now: float) -> None:
    """Decides whose claim stands, and makes others give way to it. `tenants` by model; one that can't run now is left out."""
    for model, part in arena.models.items():
        part.num_growing = tenants[model].num_growing if model in tenants else 0
        part.num_claimed = 0
    wants = {model: want for model, tenant in tenants.items() if (want := tenant.want(now)) is not None}
    if not wants:
        return
    fair = _fair_share(arena, tenants)
    within = {
        model for model, want in wants.items() if arena.models[model].num_used + want.num_blocks <= max(fair, arena.models[model].floor)
    }
    model = max(wants, key=lambda name: wants[name].weight * (FAIR_WEIGHT if name in within else 1.0))
    want, claimant = wants[model], arena.models[model]
    if claimant.num_used + want.num_blocks > claimant.num_blocks:
        return  # its own ceiling keeps it, no other model does
    claimant.num_claimed = want.num_blocks
    others = {name: tenant for name, tenant in tenants.items() if name != model}
    room = {name: max(0, arena.models[name].num_used - arena.models[name].floor) for name in others}
    if _take(others, room, want.num_missing, want.latency_class, Cause.CLASS, now) or want.waited_seconds < PATIENCE_SECONDS:
        return
    if model in within:
        room = {name: arena.models[name].num_used - max(fair, arena.models[name].floor) for name in others}
        _take(others, room, want.num_missing, want.latency_class - 1, Cause.CAPACITY, now)


def _fair_share(arena: Arena, tenants: Mapping[str, Tenant]) -> int:
    """Pages of each model that has work."""
    return arena.pages.num_blocks // max(1, sum(tenant.has_work for tenant in tenants.values()))


def _take(tenants: Mapping[str, Tenant], room: Mapping[str, int], missing: int, latency_class: int, cause: Cause, now: float) -> bool:
    """Makes them give way, who has most above its `room` first. False, and nobody does, where that wouldn't be enough."""
    offers = {name: min(tenant.num_yieldable(latency_class, now), room[name]) for name, tenant in tenants.items()}
    if sum(offer for offer in offers.values() if offer > 0) < missing:
        return False
    for name in sorted(offers, key=lambda name: -room[name]):
        if missing > 0 and offers[name] > 0:
            missing -= tenants[name].give_way(min(missing, offers[name]), latency_class, cause, now)
    return True
