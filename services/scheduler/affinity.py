"""The affinity matrix A[m, g] in Redis, and the lease of the one scheduler that writes it."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from services.scheduler import keys
from services.scheduler.store import Call, Store

LEASE_SECONDS = 5.0
KEEP_SECONDS = 3600

Key = tuple[str, str]
"""(model, worker)"""


@dataclass(frozen=True)
class Kept:
    """What is kept of an entry. asked_at: when the model was asked for there last, in Unix seconds by Redis; 0: never."""

    is_on_device: bool
    asked_at: float = 0.0


@dataclass(frozen=True)
class Led:
    """What the scheduler that leads goes by. now: Unix seconds by Redis. rates: model -> tokens placed per second, as of late."""

    now: float
    matrix: Mapping[Key, Kept]
    rates: Mapping[str, float]


class Affinity:
    """One scheduler's hand on the matrix."""

    def __init__(self, store: Store, instance: str) -> None:
        self._store = store
        self._instance = instance

    async def lead(self, models: Collection[str]) -> Led | None:
        """Takes or renews the lease; None while another scheduler has it."""
        names = sorted(models)
        key_names = [keys.PLACER, keys.AFFINITY, *map(keys.recent, names)]
        reply = await self._store.run(Call("lead", key_names, [self._instance, round(LEASE_SECONDS * 1000), *names]))
        if not reply:
            return None
        now, flat, rates = reply
        return Led(
            int(now) / 1000,
            {_key(flat[i]): Kept(**json.loads(flat[i + 1])) for i in range(0, len(flat), 2)},
            {name: float(rate) for name, rate in zip(names, rates, strict=True)},
        )

    async def write(self, matrix: Mapping[Key, Kept]) -> bool:
        """All of it. False: another scheduler leads by now."""
        entries: Iterable[str] = (
            text
            for key, kept in matrix.items()
            for text in (json.dumps(key), json.dumps({"is_on_device": kept.is_on_device, "asked_at": kept.asked_at}))
        )
        return bool(await self._store.run(Call("affinity", [keys.PLACER, keys.AFFINITY], [self._instance, KEEP_SECONDS, *entries])))

    async def resign(self) -> None:
        """Another may lead at once."""
        await self._store.run(Call("resign", [keys.PLACER], [self._instance]))


def _key(field: str) -> Key:
    model, worker = json.loads(field)
    return str(model), str(worker)
