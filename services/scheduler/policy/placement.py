"""Which models should come to which devices before anybody asks there: for what waits and is nowhere, and for devices that are too full.

The affinity matrix A[m, g] has an entry for every model m that worker g serves. Pure: figures and the time are passed in, nothing is sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EFFICIENT = 1.0
"""Sharing a device is efficient while the sum of lambda_i / mu_i_shared is below this."""
FLOOR = 1 / 8
"""Of an equal part of the cache, what a model has on a device whatever others hold there, as the arena keeps it."""
LEAST_HOLD_SECONDS, HOLD_PER_LOAD = 10.0, 4.0
"""An entry is asked for again after so long at the earliest, or so many times what a load takes."""
STRAY_TOKENS_PER_SECOND = 1.0
"""A model that gets less than this may give way to another's second copy."""


@dataclass(frozen=True)
class Entry:
    """A[m, g]: a model on a worker that serves it.

    share: of the worker's cache, that the model has or could take. tokens_per_second: mu, with the worker for itself; 0: not known yet.
    stay_seconds: until it may give way. asked_at: when it was asked for last. movable: its weights take turns there.
    """

    is_on_device: bool
    num_bytes: int = 0
    load_seconds: float = 0.0
    tokens_per_second: float = 0.0
    share: float = 1.0
    num_requests: int = 0
    stay_seconds: float = 0.0
    pinned: bool = False
    failed: bool = False
    movable: bool = True
    asked_at: float = -1e9


@dataclass(frozen=True)
class Device:
    """A worker that takes work. weights_bytes: of its device's memory, what is for weights that take turns."""

    worker_id: str
    weights_bytes: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Demand:
    """For a model, in the whole mesh: lambda in tokens per second as of late, and who waits in the queue."""

    tokens_per_second: float = 0.0
    num_waiting: int = 0
    oldest_seconds: float = 0.0


@dataclass(frozen=True)
class Prefetch:
    """This model is to come to this worker's device."""

    worker_id: str
    model: str


@dataclass(frozen=True)
class Placements:
    """What is to be done, and by which loads it was decided: worker -> sum of lambda_i / mu_i_shared."""

    prefetches: Sequence[Prefetch] = ()
    loads: Mapping[str, float] = field(default_factory=dict)


def decide(devices: Sequence[Device], demands: Mapping[str, Demand], now: float) -> Placements:
    """At most one model comes to each device: first for those who wait longest, then away from devices that are too full."""
    copies = _copies(devices)
    loads = {device.worker_id: load(device, demands, copies) for device in devices}
    prefetches: list[Prefetch] = []
    taken: set[str] = set()
    waiting = sorted((m for m, d in demands.items() if d.num_waiting and not copies.get(m)), key=lambda m: (-demands[m].oldest_seconds, m))
    full = sorted((d for d in devices if loads[d.worker_id] >= EFFICIENT), key=lambda d: (-loads[d.worker_id], d.worker_id))
    for model in waiting:
        if not _is_coming(model, devices, now) and (found := _best(model, devices, loads, taken, now)) is not None:
            prefetches.append(Prefetch(found, model))
            taken.add(found)
    for device in full:
        move = _relief(device, devices, demands, loads, taken, now)
        if move is not None and move.model not in {p.model for p in prefetches}:
            prefetches.append(move)
            taken.add(move.worker_id)
    return Placements(prefetches, loads)


def load(device: Device, demands: Mapping[str, Demand], copies: Mapping[str, int]) -> float:
    """The sum of lambda_i / mu_i_shared over the models there; a model's demand is spread evenly over the devices that have it."""
    return sum(
        _part(entry, demands.get(model, Demand()).tokens_per_second / copies[model], len(device.entries))
        for model, entry in device.entries.items()
        if entry.is_on_device
    )


def _part(entry: Entry, tokens_per_second: float, num_models: int) -> float:
    """lambda / mu_shared, where mu_shared = mu M_kv_i / M_kv. What isn't known yet is no load."""
    if entry.tokens_per_second <= 0:
        return 0.0
    return tokens_per_second / (entry.tokens_per_second * max(entry.share, FLOOR / num_models))


def _copies(devices: Sequence[Device]) -> dict[str, int]:
    copies: dict[str, int] = {}
    for device in devices:
        for model, entry in device.entries.items():
            copies[model] = copies.get(model, 0) + entry.is_on_device
    return copies


def _is_coming(model: str, devices: Sequence[Device], now: float) -> bool:
    return any((entry := device.entries.get(model)) is not None and not _may_ask(entry, now) for device in devices)


def _may_ask(entry: Entry, now: float) -> bool:
    return now - entry.asked_at >= max(LEAST_HOLD_SECONDS, HOLD_PER_LOAD * entry.load_seconds)


def _best(model: str, devices: Sequence[Device], loads: Mapping[str, float], taken: set[str], now: float) -> str | None:
    """The device with room on which the least is going on; of equals the one where it comes soonest."""
    able = [device for device in devices if device.worker_id not in taken and could_come(model, device, now)]
    ranked = sorted((round(loads[d.worker_id], 3), d.entries[model].load_seconds, d.worker_id) for d in able)
    return ranked[0][-1] if ranked else None


def could_come(model: str, device: Device, now: float, spare: Mapping[str, Demand] | None = None) -> bool:
    """Whether it is elsewhere and could have the place of what is idle there. `spare`: and of that only what has no such demand."""
    entry = device.entries.get(model)
    if entry is None or entry.is_on_device or entry.failed or not entry.movable or not _may_ask(entry, now):
        return False
    kept = sum(
        other.num_bytes
        for name, other in device.entries.items()
        if other.is_on_device and (_stays(other) or (spare is not None and _is_wanted(spare.get(name, Demand()))))
    )
    return kept + entry.num_bytes <= device.weights_bytes


def _stays(entry: Entry) -> bool:
    return entry.pinned or entry.num_requests > 0 or entry.stay_seconds > 0


def _is_wanted(demand: Demand) -> bool:
    return demand.num_waiting > 0 or demand.tokens_per_second >= STRAY_TOKENS_PER_SECOND


def _relief(
    full: Device, devices: Sequence[Device], demands: Mapping[str, Demand], loads: Mapping[str, float], taken: set[str], now: float
) -> Prefetch | None:
    """A second copy of what loads the full device most, on one where half of it leaves the sum efficient."""
    copies = _copies(devices)
    parts = {
        model: _part(entry, demands.get(model, Demand()).tokens_per_second / copies[model], len(full.entries))
        for model, entry in full.entries.items()
        if entry.is_on_device
    }
    for model in sorted(parts, key=lambda m: (-parts[m], m)):
        if not parts[model] or _is_coming(model, devices, now):
            continue
        for other in sorted(devices, key=lambda d: (loads[d.worker_id], d.worker_id)):
            relieved = loads[other.worker_id] + parts[model] * copies[model] / (copies[model] + 1)
            if other.worker_id not in taken and relieved < min(EFFICIENT, loads[full.worker_id]) and could_come(model, other, now, demands):
                return Prefetch(other.worker_id, model)
    return None
