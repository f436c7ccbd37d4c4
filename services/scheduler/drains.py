"""Which workers operators have taken out of service, by the name of the worker or of its node; all schedulers share it."""

from forebay.v1 import scheduler_pb2
from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.audit import Act, Audit
from services.scheduler.registry import Registry
from services.scheduler.store import Store

MAX_DRAINED = 10_000


class Drains:
    """Read at a start, when another scheduler tells of a change, and once a second in case its word was lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: frozenset[str] = frozenset()

    def covers(self, registration: scheduler_pb2.Register) -> bool:
        """Whether this worker is to be out of service."""
        return registration.worker_id in self._names or registration.node_id in self._names

    async def refresh(self) -> None:
        """StatusError UNAVAILABLE while Redis is away: what was read last stays."""
        (names,) = await self._store.commands(["HKEYS", keys.DRAINED])
        self._names = frozenset(names)

    async def set(self, audit: Audit, act: Act, *, drained: bool, registry: Registry, now: float) -> list[str]:
        """Workers of that name, once it is written down. NOT_FOUND for a name that nobody has, or that isn't drained."""
        name = act.target
        workers = registry.named(name, now)
        if drained and not workers:
            raise StatusError(Code.NOT_FOUND, f"there is no worker and no node {name}: `forebay ps` lists them")
        if not drained and name not in self._names:
            await self.refresh()
            if name not in self._names and not await audit.repeats(act):
                raise StatusError(Code.NOT_FOUND, f"{name} isn't drained by that name")
        await audit.change(act, keys.DRAINED, name, act.actor if drained else "", most=MAX_DRAINED)
        await self.refresh()
        return workers
