"""Work on text that would hold up the event loop where there is much of it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_LONG_CHARS = 16 << 10  # the loop has streams to serve
Result = TypeVar("Result")


async def aside(work: Callable[[], Result], num_chars: int) -> Result:
    """What `work` returns or raises; from a thread where it has so many characters to look at."""
    return await asyncio.to_thread(work) if num_chars > _LONG_CHARS else work()
