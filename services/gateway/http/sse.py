"""Answers that end with their connection: a JSON answer or server-sent events, both given up when the client is gone.

The status line waits for the first event, so that whatever fails before it is an ordinary error response.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common import log
from services.common.errors import Code, StatusError
from services.gateway.http import errors

_log = log.get(__name__)

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away: StatusError CANCELLED then. Call it once the body is read."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise StatusError(Code.CANCELLED, "the client closed the connection")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `chunks` yields. An error before the first chunk is a plain error answer; a later one is one error event, then the end."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes], slow_reader_seconds: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._patience = slow_reader_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._stream(scope, receive, send))
        except StatusError:
            _log.debug("client_gone")
        except TimeoutError:  # the response stays unfinished, so the server closes the connection
            _log.info("slow_reader_given_up", seconds=self._patience)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._patience):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)
            except StatusError as error:
                await errors.response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await put(first)
            try:
                async for chunk in chunks:
                    await put(chunk)
            except StatusError as error:
                await put(event(errors.body_of(error)))
            await put(b"", more=False)
