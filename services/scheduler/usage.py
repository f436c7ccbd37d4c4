"""What orgs have used, as the scripts have written it down: by day, model and class. Reads only."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.common.errors import invalid
from services.scheduler import keys
from services.scheduler.store import Store

MAX_DAYS = 90
MAX_PLACES = 20_000
_DAY_SECONDS = 86_400
_AT_ONCE = 500
"""Hashes to ask for in one exchange, which must not hold up the queue."""


@dataclass
class UsageRow:
    """One org's use of one model in one class on one day (UTC, YYYY-MM-DD)."""

    org: str
    day: str
    model: str
    latency_class: int
    requests: int = 0
    failed: int = 0
    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Usage:
    """The ledger of the last 90 days."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def rows(self, org: str, days: int) -> list[UsageRow]:
        """Of one org, or of all (''); of so many days, today among them. By org, day, model and class."""
        today = int(self._clock() // _DAY_SECONDS)
        # A day more: Redis's clock, by which the days are counted, may be ahead of ours.
        wanted = range(today - days + 1, today + 2)
        orgs = [[org]] * len(wanted) if org else await self._store.commands(*(["SMEMBERS", keys.users(day)] for day in wanted))
        places = [(day, name) for day, names in zip(wanted, orgs, strict=True) for name in names]
        if len(places) > MAX_PLACES:
            raise invalid(
                "days", f"{days} days of all orgs are {len(places)} tables; one answer has at most {MAX_PLACES}: ask for fewer days"
            )
        replies: list[list[str]] = []
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            replies += await self._store.commands(*(["HGETALL", keys.usage(day, name)] for day, name in some))
        rows = [row for (day, name), flat in zip(places, replies, strict=True) for row in _rows(name, day, flat)]
        return sorted(rows, key=lambda row: (row.org, row.day, row.model, row.latency_class))


def _rows(org: str, day: int, flat: list[str]) -> list[UsageRow]:
    rows: dict[str, UsageRow] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        counter, _, line = field.partition(":")
        if line not in rows:
            date = datetime.fromtimestamp(day * _DAY_SECONDS, UTC).date().isoformat()
            rows[line] = UsageRow(org, date, *keys.parse_line(line))
        setattr(rows[line], counter, int(value))
    return list(rows.values())
