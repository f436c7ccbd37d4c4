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
MAX_DENIED = 1_000
"""Attempts of others than operators: kept apart, so that a flood of them pushes no act out."""
MAX_DETAILS_CHARS = 2_000
REPEAT_SECONDS = 60.0
"""So long an act that finds its work done by the same hand counts as sent again."""
_LOOK_BACK = 100


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

        NOT_FOUND, RESOURCE_EXHAUSTED or ABORTED where that can't be. What is sent again, as its answer was lost, is done.
        """
        act = self._stamped(act)
        args: list[str | int] = [field, value, json.dumps(asdict(act)), most, MAX_ENTRIES, self._instance]
        outcome = await self._store.run(Call("act", [key, keys.AUDIT], args if known is None else [*args, known]))
        if outcome == "none":
            if await self.repeats(act):
                return
            raise StatusError(Code.NOT_FOUND, f"there is no {act.target}")
        if outcome == "changed":
            raise StatusError(Code.ABORTED, f"somebody else has changed {act.target} just now: look and try again", reason="CHANGED")
        if outcome == "full":
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"there are {most} already: take some out first", reason="TOO_MANY")
        _tell(act)

    async def repeats(self, act: Act) -> bool:
        """Whether this actor did this just now: the act was sent again, perhaps by a gateway that asked another scheduler first."""
        since = self._clock() - REPEAT_SECONDS
        (texts,) = await self._store.commands(["LRANGE", keys.AUDIT, 0, _LOOK_BACK - 1])
        done = (Act(**json.loads(text)) for text in texts)
        same = (act.actor, act.act, act.target, Code.OK.name)
        return any(entry.at >= since and (entry.actor, entry.act, entry.target, entry.outcome) == same for entry in done)

    async def denied(self, act: Act) -> None:
        """Writes down that somebody without the role tried. While Redis is away the log alone has it."""
        await self._write(replace(self._stamped(act), outcome=Code.PERMISSION_DENIED.name), keys.DENIED, MAX_DENIED)

    async def done(self, act: Act) -> None:
        """Writes an act down that has changed nothing in Redis. While Redis is away the log alone has it."""
        act = self._stamped(act)
        await self._write(act, keys.AUDIT, MAX_ENTRIES)

    async def refused(self, act: Act, error: StatusError) -> None:
        """Writes an attempt down that came to nothing. While Redis is away the log alone has it."""
        await self._write(replace(self._stamped(act), outcome=error.code.name), keys.AUDIT, MAX_ENTRIES)

    async def _write(self, act: Act, key: str, most: int) -> None:
        _tell(act)
        try:
            await self._store.commands(["LPUSH", key, json.dumps(asdict(act))], ["LTRIM", key, 0, most - 1])
        except StatusError:
            LOG.warning("audit_not_stored", act=act.act, target=act.target)

    def _stamped(self, act: Act) -> Act:
        return replace(act, at=self._clock(), details=act.details[:MAX_DETAILS_CHARS])

    async def latest(self, num: int) -> list[Act]:
        """Newest first, what was denied among them."""
        done, denied = await self._store.commands(["LRANGE", keys.AUDIT, 0, num - 1], ["LRANGE", keys.DENIED, 0, num - 1])
        acts = [Act(**json.loads(text)) for text in (*done, *denied)]
        return sorted(acts, key=lambda act: -act.at)[:num]


def _tell(act: Act) -> None:
    LOG.info("audit", **asdict(act))
