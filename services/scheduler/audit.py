"""What operators did, and what was refused to them: written down with the act itself, or alone. Knows no act."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from services.common import log
from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.store import Call, Store

LOG = log.get(__name__)
MAX_ENTRIES = 10_000
MAX_DETAILS_CHARS = 2_000


@dataclass(frozen=True)
class Act:
    """One act. `at`: Unix seconds; `details`: what was set, without secrets; `outcome`: a status code's name."""

    actor: str
    act: str
    target: str
    details: str = ""
    at: float = 0.0
    outcome: str = Code.OK.name


class Audit:
    """The latest acts, in Redis, and every act in the log."""

    def __init__(self, store: Store, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._instance = instance
        self._clock = clock

    async def change(self, act: Act, key: str, field: str, value: str, *, most: int, known: str | None = None) -> None:
        """Sets a field of a hash ('': takes it out) and writes the act down, if the field still holds `known` (None: whatever it holds).

        NOT_FOUND, RESOURCE_EXHAUSTED or ABORTED where that can't be.
        """
        act = self._stamped(act)
        args: list[str | int] = [field, value, json.dumps(asdict(act)), most, MAX_ENTRIES, self._instance]
        outcome = await self._store.run(Call("act", [key, keys.AUDIT], args if known is None else [*args, known]))
        if outcome == "none":
            raise StatusError(Code.NOT_FOUND, f"there is no {act.target}")
        if outcome == "changed":
            raise StatusError(Code.ABORTED, f"somebody else has changed {act.target} just now: look and try again", reason="CHANGED")
        if outcome == "full":
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"there are {most} already: take some out first", reason="TOO_MANY")
        _tell(act)

    async def done(self, act: Act) -> None:
        """Writes an act down that has changed nothing in Redis. While Redis is away the log alone has it."""
        act = self._stamped(act)
        _tell(act)
        await self._write(act)

    async def refused(self, act: Act, error: StatusError) -> None:
        """Writes an attempt down that came to nothing. While Redis is away the log alone has it."""
        act = replace(self._stamped(act), outcome=error.code.name)
        _tell(act)
        await self._write(act)

    async def _write(self, act: Act) -> None:
        try:
            await self._store.commands(["LPUSH", keys.AUDIT, json.dumps(asdict(act))], ["LTRIM", keys.AUDIT, 0, MAX_ENTRIES - 1])
        except StatusError:
            LOG.warning("audit_not_stored", act=act.act, target=act.target)

    def _stamped(self, act: Act) -> Act:
        return replace(act, at=self._clock(), details=act.details[:MAX_DETAILS_CHARS])

    async def latest(self, num: int) -> list[Act]:
        """Newest first."""
        (texts,) = await self._store.commands(["LRANGE", keys.AUDIT, 0, num - 1])
        return [Act(**json.loads(text)) for text in texts]


def _tell(act: Act) -> None:
    LOG.info("audit", **asdict(act))
