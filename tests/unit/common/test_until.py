"""A process lives until it is told to stop or one of its loops ends."""

import asyncio

import pytest

from services.common import process


async def test_a_loop_that_fails_ends_the_process() -> None:
    async def fails() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        await asyncio.wait_for(process.until(asyncio.Event(), asyncio.create_task(fails())), 5)


async def test_a_stop_leaves_the_loops_to_their_owner() -> None:
    stop = asyncio.Event()
    loop = asyncio.create_task(asyncio.Event().wait())
    stop.set()
    await asyncio.wait_for(process.until(stop, loop), 5)  # type: ignore[arg-type]
    assert not loop.done()
    loop.cancel()
