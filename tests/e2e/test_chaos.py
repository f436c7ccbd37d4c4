"""The short tier of `make chaos`: a few trials of the rows that bring down, restart or leave each kind of process."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from bench.chaos.__main__ import figures, run_row
from bench.chaos.fleet import Fleet, running
from bench.chaos.table import ROWS
from bench.chaos.traffic import Traffic

TRIALS = {"F01": 3, "F05": 3, "F06": 1, "F07": 3, "F09": 3, "F10": 3, "F16": 3, "F20": 1, "F21": 3}
_ROWS = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """On which the fleet's links run while a test does."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def fleet(loop: asyncio.Runner) -> Iterator[Fleet]:
    async def start() -> tuple[AsyncExitStack, Fleet]:
        stack = AsyncExitStack()
        return stack, await stack.enter_async_context(running())

    stack, fleet = loop.run(start())
    yield fleet
    loop.run(stack.aclose())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TRIALS)
def test_no_request_is_lost_doubled_or_wrong(name: str, loop: asyncio.Runner, fleet: Fleet) -> None:
    async def run() -> list[dict[str, object]]:
        traffic = Traffic(fleet)
        try:
            return figures(_ROWS[name], await run_row(fleet, traffic, _ROWS[name], TRIALS[name], seed=1))
        finally:
            await traffic.close()

    missed = [figure for figure in loop.run(run()) if figure["holds"] is False and not str(figure["figure"]).startswith("gap_")]
    assert not missed
