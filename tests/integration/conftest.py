"""What the scripts are tested on: a ledger on a real Redis."""

from collections.abc import AsyncIterator

import pytest

from tests.scheduler_harness import LedgerBench, ledger_bench


@pytest.fixture
async def bench(redis_server) -> AsyncIterator[LedgerBench]:
    async with ledger_bench(redis_server.url) as bench:
        yield bench
