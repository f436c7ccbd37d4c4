"""Which models' weights are in device memory, who comes next and who gives way. Pure: bytes and times are told, nothing is moved here.

Every model's weights lie in host memory; a device copy is an extent of the budget. Who waits comes by class and age, so nobody waits for
ever; who is idle gives way first, the least recently used of them, then who has been there longest. Nobody does before having stayed for
a while, so two hot models that don't fit together change places so often and no oftener.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from services.worker.engine.composition import DOUBLING_SECONDS, WEIGHTS

MIN_STAY_SECONDS = 1.0
STAY_PER_LOAD = 4.0
"""While it has work, a model stays for so many times what bringing it took: at most a fifth of the time is spent on that."""
ALIGNMENT = 4096


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

    def add(self, model: str, num_bytes: int, *, pinned: bool = False) -> Resident:
        """A model in host memory. One that the budget can't hold is kept with the reason in `failure`."""
        assert model not in self.residents, model
        resident = self.residents[model] = Resident(model, num_bytes + -num_bytes % ALIGNMENT, pinned)
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
        resident.place, resident.load_seconds = Place.DEVICE, seconds

    def next(self, work: Mapping[str, int], now: float) -> Move | None:
        """Whom to bring now, if anybody. `work`: models that have some, each with its most urgent class (1 .. 3)."""
        for resident in self.residents.values():
            self._note(resident, resident.model in work, now)
        if any(resident.place is Place.ARRIVING for resident in self.residents.values()):
            return None
        waiting = [resident for resident in self.residents.values() if resident.waiting_since is not None]
        wanted = [resident for resident in self.residents.values() if resident.pinned and resident.place is Place.HOST]
        if not waiting and not wanted:
            return None
        first = wanted[0] if wanted else max(waiting, key=lambda r: _weight(r, work[r.model], now))
        weight = _weight(first, work[first.model], now) if first.model in work else max(WEIGHTS.values())
        return self._bring(first, weight, work, now)

    @staticmethod
    def _note(resident: Resident, has_work: bool, now: float) -> None:
        if resident.is_on_device or resident.place is Place.COLD or not has_work:
            resident.waiting_since = None
        elif resident.waiting_since is None:
            resident.waiting_since = now
        if has_work and resident.is_on_device:
            resident.used_at = now

    def _bring(self, coming: Resident, weight: float, work: Mapping[str, int], now: float) -> Move | None:
        """With as few giving way as it takes, in their order. None: those who may don't make enough room."""
        evicted: list[Resident] = []
        candidates = self._candidates(weight, work, now)
        while (offset := self._hole(coming.num_bytes, evicted)) is None:
            if not candidates:
                return None
            evicted.append(candidates.pop(0))
        for victim in list(evicted):  # one whose place wasn't needed in the end stays
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


def _weight(resident: Resident, latency_class: int, now: float) -> float:
    """The class's, doubled as it waits (composition)."""
    waited = 0.0 if resident.waiting_since is None else now - resident.waiting_since
    return WEIGHTS[latency_class] * 2 ** min(waited / DOUBLING_SECONDS, 64)
