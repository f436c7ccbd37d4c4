"""What orgs have used, as the scripts have written it down: by day, model and class. Reads only."""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.common.errors import invalid
from services.scheduler import keys
from services.scheduler.store import Store

MAX_DAYS = 90
MAX_PLACES = 20_000
MAX_ROWS = 1000
"""In one answer."""
_MAX_TOKEN_CHARS = 4096
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

    @property
    def place(self) -> "Place":
        """Where it stands in the order of rows."""
        return self.org, self.day, self.model, self.latency_class


Place = tuple[str, str, str, int]
START: Place = ("", "", "", 0)
"""Before all rows."""


class Usage:
    """The ledger of the last 90 days."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def rows(self, org: str, days: int, most: int = MAX_ROWS, after: Place = START) -> list[UsageRow]:
        """Of one org, or of all (''); of so many days, today among them. By org, day, model and class, the first `most` behind `after`."""
        today = int(self._clock() // _DAY_SECONDS)
        # A day more: Redis's clock, by which the days are counted, may be ahead of ours.
        wanted = range(today - days + 1, today + 2)
        orgs = [[org]] * len(wanted) if org else await self._store.commands(*(["SMEMBERS", keys.users(day)] for day in wanted))
        places = sorted((name, day) for day, names in zip(wanted, orgs, strict=True) for name in names)
        if len(places) > MAX_PLACES:
            raise invalid(
                "days", f"{days} days of all orgs are {len(places)} tables; at most {MAX_PLACES} are looked at: ask for fewer days"
            )
        places = [(name, day) for name, day in places if (name, _date(day)) >= after[:2]]
        rows: list[UsageRow] = []
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            replies = await self._store.commands(*(["HGETALL", keys.usage(day, name)] for name, day in some))
            found = [row for (name, day), flat in zip(some, replies, strict=True) for row in _rows(name, day, flat)]
            rows += sorted((row for row in found if row.place > after), key=lambda row: row.place)
            if len(rows) >= most:
                break
        return rows[:most]


def write_token(row: UsageRow) -> str:
    """What a page that ends with this row is continued by."""
    return base64.urlsafe_b64encode(json.dumps(row.place).encode()).decode()


def read_token(token: str) -> Place:
    """Where a page begins. INVALID_ARGUMENT for what write_token has not made."""
    if not token:
        return START
    try:
        place = json.loads(base64.urlsafe_b64decode(token)) if len(token) <= _MAX_TOKEN_CHARS else None
    except (ValueError, RecursionError):
        place = None
    match place:
        case [str(org), str(day), str(model), int(latency_class)]:
            return org, day, model, latency_class
    raise invalid("page_token", "page_token is none that an answer here has ended with: leave it out for the first page")


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_SECONDS, UTC).date().isoformat()


def _rows(org: str, day: int, flat: list[str]) -> list[UsageRow]:
    rows: dict[str, UsageRow] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        counter, _, line = field.partition(":")
        if line not in rows:
            rows[line] = UsageRow(org, _date(day), *keys.parse_line(line))
        setattr(rows[line], counter, int(value))
    return list(rows.values())
