"""For tests of quotas: a ledger on a real Redis whose scripts read a clock that the test moves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha1
from typing import Any

from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.ledger import Queued
from services.scheduler.policy.order import Ticket
from services.scheduler.quota import Over
from services.scheduler.store import Store
from tests.scheduler_harness import LedgerBench

_CLOCK = "test:clock"
START_MS = 1_700_000_000_000


def limited(org: str = "acme", **fields: Any) -> OrgPolicy:
    """A policy with these limits."""
    return OrgPolicy(org, **fields).complete()


class QuotaBench(LedgerBench):
    """Time stands still but for `advance`."""

    async def advance(self, ms: int) -> None:
        """Time passes, or is set back."""
        await self.raw("INCRBY", _CLOCK, ms * 1000)

    async def take(self, ticket: Ticket, org: OrgPolicy, **options: Any) -> bool:
        """Queues under a policy; whether the quota allowed it."""
        answer = await self.enqueue(ticket, org=org, **options)
        assert isinstance(answer, Queued | Over), answer
        return isinstance(answer, Queued)

    async def flush(self) -> None:
        """Redis forgets everything but the time."""
        now = await self.raw("GET", _CLOCK)
        await self.raw("FLUSHALL")
        await self.raw("SET", _CLOCK, now)

    async def spent(self, org: str = "acme") -> tuple[float, float]:
        """Requests and tokens that the org's buckets lack now."""
        fields = ("at", "requests", "requests_rate", "tokens", "tokens_rate")
        values = await self.raw("HMGET", keys.quota(org), *fields)
        at, requests, requests_rate, tokens, tokens_rate = (int(value or 0) for value in values)
        passed = max(0, int(await self.raw("GET", _CLOCK)) // 1000 - at)
        return max(0, requests - passed * requests_rate) / 60_000, max(0, tokens - passed * tokens_rate) / 60_000

    async def live(self, org: str = "acme") -> set[str]:
        """The org's live tickets."""
        return set(await self.raw("SMEMBERS", keys.live(org)))


@asynccontextmanager
async def quota_bench(url: str, **options: Any) -> AsyncIterator[QuotaBench]:
    """A bench on this Redis."""
    store = Store(url, timeout_seconds=5)
    await store.open()
    # A debt's key goes by Redis's own clock when the debt is regained, which says nothing while time stands still.
    swaps = {"redis.call('TIME')": f"{{0, redis.call('GET', '{_CLOCK}')}}", "redis.call('PEXPIRE', K.quota .. org, int(ms))": "nil"}
    for name, text in store._scripts.items():
        for real, fake in swaps.items():
            assert real in text
            text = text.replace(real, fake)
        store._scripts[name] = text
        store._hashes[name] = sha1(text.encode(), usedforsecurity=False).hexdigest()
    await store.commands(["SET", _CLOCK, START_MS * 1000])
    try:
        yield QuotaBench(store, **options)
    finally:
        await store.close()
