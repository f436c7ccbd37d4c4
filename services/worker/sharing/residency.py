"""Which models' weights are in device memory, who comes next and who gives way. Pure: bytes and times are told, nothing is moved here.

Every model's weights lie in host memory; a device copy is an extent of the budget. Who waits comes by class and age, so nobody waits for
ever; who is idle gives way first, the least recently used of them, then who has been there longest. Nobody does before having stayed for
a while, so two hot models that don't fit together change places so often and no oftener.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from services.worker.engine.composition import DOUBLING_SECONDS, WEIGHTS

MIN_STAY_SECONDS = 1.0
STAY_PER_LOAD = 4.0
"""While it has work, a model stays for so many times what bringing it took: at most a fifth of the time is spent on that."""
ALIGNMENT = 4096
LOAD_SECONDS, PREFETCH_SECONDS = 60.0, 5.0
"""For so long room is looked for when an operator, or a scheduler, wants a model here that nobody asks for."""
RATE_MEMORY = 0.5
"""What a new measurement of bytes per second counts beside those before."""


class Place(Enum):
    """Where a model's weights are."""

    COLD = 1  # in no memory: they couldn't be read, see Resident.failure
    HOST = 2
    ARRIVING = 3  # on the device in part
    DEVICE = 4


@dataclass
class Resident:
    """A model's weights."""

    model: str
    num_bytes: int
    pinned: bool  # never gives way
    place: Place = Place.HOST
    failure: str | None = None
    offset: int = 0  # on the device
    waiting_since: float | None = None  # has work, and isn't on the device
    came_at: float = 0.0  # when it was to be brought
    used_at: float = 0.0
    load_seconds: float = 0.0  # the last time
    num_loads: int = 0
    num_evictions: int = 0
    always_pinned: bool = False  # by the worker's own settings
    wanted_until: float = 0.0  # somebody wants it here, though it has no work
    wanted_weight: float = 0.0  # of whom it pushes aside for that; 0: the idle alone

    @property
    def is_on_device(self) -> bool:
        return self.place in (Place.ARRIVING, Place.DEVICE)

    @property
    def stay_seconds(self) -> float:
        """How long it stays at least while it has work."""
        return max(MIN_STAY_SECONDS, STAY_PER_LOAD * self.load_seconds)


@dataclass(frozen=True)
class Move:
    """What is to be done now: these give up their copies, then this one's bytes go to `offset`."""

    model: str
    offset: int
    evicted: tuple[str, ...]


class Residency:
    """`budget` is the bytes of device memory for weights. One model comes at a time."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.residents: dict[str, Resident] = {}
        self.bytes_per_second = 0.0
        """Measured; 0 while nothing was."""

    def add(self, model: str, num_bytes: int, *, pinned: bool = False) -> Resident:
        """A model in host memory. One that the budget can't hold is kept with the reason in `failure`."""
        assert model not in self.residents, model
        resident = self.residents[model] = Resident(model, num_bytes + -num_bytes % ALIGNMENT, pinned, always_pinned=pinned)
        reserved = sum(other.num_bytes for other in self.residents.values() if other.pinned and other is not resident)
        if resident.num_bytes > self.budget - reserved:
            self.fail(
                model,
                f"its weights take {resident.num_bytes} bytes; the device has {self.budget} for weights, of which pinned models hold "
                f"{reserved}: raise the device memory, or serve it at fewer bits",
            )
        return resident

    def fail(self, model: str, reason: str) -> None:
        """It can't be served: no weights, or no room ever. Others don't notice."""
        resident = self.residents[model]
        resident.place, resident.failure, resident.pinned, resident.waiting_since = Place.COLD, reason, False, None

    def arrived(self, model: str, seconds: float) -> None:
        """All of it is on the device; bringing it took so long."""
        resident = self.residents[model]
        assert resident.place is Place.ARRIVING, resident
        resident.place, resident.load_seconds, resident.wanted_until = Place.DEVICE, seconds, 0.0
        if seconds > 0:
            rate = resident.num_bytes / seconds
            self.bytes_per_second += (rate - self.bytes_per_second) * (RATE_MEMORY if self.bytes_per_second else 1.0)

    def seconds_to_load(self, model: str) -> float | None:
        """By its bytes and the rate that was measured; None while none was."""
        return self.residents[model].num_bytes / self.bytes_per_second if self.bytes_per_second else None

    def want(self, model: str, now: float, *, urgent: bool) -> None:
        """It is to come though it has no work: before others' work that isn't realtime, or, not urgent, where only the idle give way."""
        resident = self.residents[model]
        resident.wanted_until = now + (LOAD_SECONDS if urgent else PREFETCH_SECONDS)
        resident.wanted_weight = max(WEIGHTS.values()) if urgent else 0.0

    def drop(self, model: str) -> None:
        """Its device copy is given up; the caller knows that nobody needs it."""
        resident = self.residents[model]
        assert not resident.pinned, model
        resident.wanted_until = 0.0
        if resident.place is Place.DEVICE:
            resident.place = Place.HOST
            resident.num_evictions += 1

    def why_not_pin(self, model: str) -> str:
        """Why it can't be pinned beside those that are; empty if it can."""
        resident = self.residents[model]
        if resident.failure is not None:
            return resident.failure
        pinned = sum(other.num_bytes for other in self.residents.values() if other.pinned and other is not resident)
        others = [r.num_bytes for r in self.residents.values() if not r.pinned and r is not resident and r.failure is None]
        left = self.budget - pinned - resident.num_bytes
        if left >= max(others, default=0):
            return ""
        return (
            f"its weights take {resident.num_bytes} bytes of {self.budget}, pinned models {pinned}; what is left, {max(0, left)}, must "
            f"hold the largest other model, {max(others, default=0)} bytes: unpin another, or raise the device memory"
        )

    def pin(self, models: Collection[str]) -> None:
        """These stay, beside those of the worker's settings, and no others. What can't be pinned isn't; see why_not_pin."""
        for resident in self.residents.values():
            resident.pinned = resident.always_pinned or (resident.pinned and resident.model in models)
        for model in sorted(models):
            if model in self.residents and not self.why_not_pin(model):
                self.residents[model].pinned = True

    @property
    def is_moving(self) -> bool:
        """Whether something is coming, or is to come as soon as there is room, be there work or not."""
        return any(
            r.place is Place.ARRIVING or (r.place is Place.HOST and (r.pinned or r.wanted_until > 0.0)) for r in self.residents.values()
        )

    def next(self, work: Mapping[str, int], now: float) -> Move | None:
        """Whom to bring now, if anybody. `work`: models that have some, each with its most urgent class (1 .. 3)."""
        for resident in self.residents.values():
            self._note(resident, resident.model in work, now)
        if any(resident.place is Place.ARRIVING for resident in self.residents.values()):
            return None
        waiting = [resident for resident in self.residents.values() if resident.waiting_since is not None]
        pinned = [resident for resident in self.residents.values() if resident.pinned and resident.place is Place.HOST]
        wanted = [resident for resident in self.residents.values() if resident.wanted_until > 0.0 and resident.place is Place.HOST]
        coming = pinned or [r for r in wanted if r.wanted_weight] or waiting or wanted
        if not coming:
            return None
        first = max(coming, key=lambda r: _weight(r, work.get(r.model), now))
        weight = max(WEIGHTS.values()) if first.pinned else _weight(first, work.get(first.model), now)
        return self._bring(first, weight, work, now)

    @staticmethod
    def _note(resident: Resident, has_work: bool, now: float) -> None:
        if resident.is_on_device or resident.place is Place.COLD or not has_work:
            resident.waiting_since = None
        elif resident.waiting_since is None:
            resident.waiting_since = now
        if has_work and resident.is_on_device:
            resident.used_at = now
        if now > resident.wanted_until:
            resident.wanted_until = 0.0

    def _bring(self, coming: Resident, weight: float, work: Mapping[str, int], now: float) -> Move | None:
        """With as few giving way as it takes, in their order. None: those who may don't make enough room.

        Pinned models do so where the room is there, but in pieces: they come again at once, behind the new one.
        """
        evicted: list[Resident] = []
        candidates = self._candidates(weight, work, now)
        while (offset := self._hole(coming.num_bytes, evicted)) is None:
            if not candidates and not (candidates := self._in_the_way(coming, evicted)):
                return None
            evicted.append(candidates.pop(0))
        moved = [victim for victim in evicted if victim.pinned]
        if moved:  # all of them, or the gaps between those that stayed would send them to and fro
            evicted += [r for r in self.residents.values() if r.pinned and r.place is Place.DEVICE and r not in moved]
            offset = self._hole(coming.num_bytes, evicted) or 0
        for victim in [] if moved else list(evicted):  # one whose place wasn't needed in the end stays
            kept = [other for other in evicted if other is not victim]
            if (hole := self._hole(coming.num_bytes, kept)) is not None:
                evicted, offset = kept, hole
        for victim in evicted:
            victim.place = Place.HOST
            victim.num_evictions += 1
            victim.waiting_since = now if victim.model in work else None
        coming.place, coming.offset, coming.came_at, coming.used_at, coming.waiting_since = Place.ARRIVING, offset, now, now, None
        coming.num_loads += 1
        return Move(coming.model, offset, tuple(victim.model for victim in evicted))

    def _candidates(self, weight: float, work: Mapping[str, int], now: float) -> list[Resident]:
        """Who may give way to one of that weight: the idle, then those who have had their turn and whose work isn't more urgent."""
        there = [r for r in self.residents.values() if r.place is Place.DEVICE and not r.pinned]
        idle = [r for r in there if r.model not in work and now - r.came_at >= MIN_STAY_SECONDS]
        busy = [r for r in there if r.model in work and now - r.came_at >= r.stay_seconds and WEIGHTS[work[r.model]] <= weight]
        idle.sort(key=lambda r: r.used_at)
        busy.sort(key=lambda r: r.came_at)
        return idle + busy

    def _in_the_way(self, coming: Resident, evicted: list[Resident]) -> list[Resident]:
        """Pinned models between which there is room enough, but in pieces."""
        there = [r for r in self.residents.values() if r.is_on_device and r not in evicted]
        if sum(r.num_bytes for r in there) + coming.num_bytes > self.budget:
            return []
        return [r for r in there if r.pinned and r.place is Place.DEVICE]

    def _hole(self, num_bytes: int, without: list[Resident]) -> int | None:
        """The first place that is large enough."""
        taken = sorted((r.offset, r.num_bytes) for r in self.residents.values() if r.is_on_device and r not in without)
        start = 0
        for offset, length in [*taken, (self.budget, 0)]:
            if offset - start >= num_bytes:
                return start
            start = max(start, offset + length)
        return None

    def check_integrity(self) -> None:
        """Asserts that device copies lie apart and within the budget."""
        end = 0
        for resident in sorted((r for r in self.residents.values() if r.is_on_device), key=lambda r: r.offset):
            assert resident.offset >= end, f"{resident.model} lies over another"
            end = resident.offset + resident.num_bytes
        assert end <= self.budget, "beyond the budget"


def _weight(resident: Resident, latency_class: int | None, now: float) -> float:
    """The class's, doubled as it waits (composition); without work, that of whoever wants it."""
    if latency_class is None:
        return resident.wanted_weight
    waited = 0.0 if resident.waiting_since is None else now - resident.waiting_since
    return WEIGHTS[latency_class] * 2 ** min(waited / DOUBLING_SECONDS, 64)
