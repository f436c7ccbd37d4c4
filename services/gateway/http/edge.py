"""The outside of every call: its answer's headers, its place among the open calls, and an answer where all else failed.

The client's x-request-id is echoed and is a label only; where there is none, the answer gets one to ask us about.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import log
from services.common.errors import Code, StatusError, invalid, unavailable
from services.gateway.gateway import OpenCalls
from services.gateway.http import errors
from services.gateway.metrics import GatewayMetrics
from services.gateway.validator import validate_label

_log = log.get(__name__)

CALLER = "forebay.caller"
"""Where the scope of a request that comes from this process names its caller."""


class Edge:
    """Middleware: every answer, errors included, carries x-request-id and what the handlers put into `of(request)`.

    What asks for work (POST) counts as an open call until its answer has ended. HEAD is GET; the server leaves the body out.
    """

    def __init__(self, app: ASGIApp, calls: OpenCalls, metrics: GatewayMetrics, draining: Callable[[], bool]) -> None:
        """While `draining`, an answer ends its connection: the client's next one is another gateway's."""
        self._app = app
        self._draining = draining
        self._calls = calls
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {"x-request-id": uuid4().hex}
        scope.setdefault("state", {}).update(answer_headers=headers, received_at=time.monotonic())
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        started = False

        async def put(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._metrics.calls.labels("http", _method(inner), str(message["status"])).inc()
                answered = MutableHeaders(scope=message)
                if self._draining():
                    answered["connection"] = "close"
                for name, value in headers.items():
                    answered.setdefault(name, value)  # what an error says of itself is newer
            await send(message)

        try:
            label = client_id(Headers(scope=scope))
            if label:
                headers["x-request-id"] = label
            with self._calls.one() if scope["method"] == "POST" else nullcontext():
                await self._app(inner, receive, put)
        except asyncio.CancelledError:  # the gateway stops and has waited long enough
            if started:
                raise
            stopping = unavailable("the gateway is stopping: try again", reason="STOPPING")
            await errors.response(stopping)(scope, receive, put)
        except Exception as error:  # a refusal of this place, or our bug: the client gets a typed end, the log gets the trace
            if started:
                raise  # the server logs it and closes the connection
            await errors.response(_typed(error, scope, headers["x-request-id"]))(scope, receive, put)


def _typed(error: Exception, scope: Scope, request_id: str) -> StatusError:
    if isinstance(error, StatusError):
        return error
    _log.exception("call_failed", path=scope["path"][:128], request_id=request_id)
    return StatusError(Code.INTERNAL, "the gateway failed on this request: try again, and report it if it fails again")


def _method(scope: Scope) -> str:
    """The endpoint's name, which the router has put there: of a path that it doesn't know nothing is taken over."""
    return getattr(scope.get("endpoint"), "__name__", "other")


def of(request: Request) -> dict[str, Any]:
    """Headers that the answer to this request will carry."""
    headers: dict[str, Any] = request.state.answer_headers
    return headers


def client_id(headers: Headers) -> str:
    """The client's own id, "" where there is none. Refuses more than one, and what no label may be."""
    given = headers.getlist("x-request-id")
    if len(given) > 1:
        raise invalid("x-request-id", f"x-request-id is given {len(given)} times: send one")
    label = validate_label(given[0] if given else None, name="x-request-id")
    if not label.isascii():
        raise invalid("x-request-id", "x-request-id has characters beyond ASCII: send printable ASCII")
    return label
