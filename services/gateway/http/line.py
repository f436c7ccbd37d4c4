"""A job's line, answered by the OpenAI face itself: the same request, without a socket."""

import asyncio
import json
import math
import time
from typing import Any

from starlette.requests import Request
from starlette.types import Message

from forebay.v1 import batch_pb2
from services.common.errors import Code, StatusError
from services.gateway.auth import Caller
from services.gateway.batch_lines import ENDPOINTS
from services.gateway.batch_runner import Reply
from services.gateway.gateway import Gateway
from services.gateway.http import edge, errors
from services.gateway.http.app import Face
from services.gateway.http.head import MAX_DEADLINE_SECONDS

_DEFINITE = frozenset((400, 401, 403, 404, 409, 413, 415, 501))
_NEVER_FITS = "REQUEST_TOO_LARGE"  # the scheduler's reason


class LineFace:
    """Answers lines in the name of their org, in the class batch."""

    def __init__(self, gateway: Gateway) -> None:
        self._face = Face(gateway, "batch")

    async def answer(self, line: batch_pb2.LeasedLine, body: Any) -> Reply:
        """The reply, which may be an error that would come again. Raises StatusError for any other."""
        request = _request(line, json.dumps(body, ensure_ascii=False).encode())
        try:
            response = await getattr(self._face, ENDPOINTS[line.endpoint])(request)
        except StatusError as error:
            status = errors.status_of(error)
            if status not in _DEFINITE and error.reason != _NEVER_FITS:
                raise
            told = errors.response(error)
            return Reply(status, _request_id(request), bytes(told.body))
        if not isinstance(response.body, bytes):  # it was checked that no line asks for a stream
            raise StatusError(Code.INTERNAL, f"{line.endpoint} answered a line with a stream")
        return Reply(response.status_code, _request_id(request), response.body)


def _request(line: batch_pb2.LeasedLine, body: bytes) -> Request:
    seconds = min(max(line.seconds_left, 0.001), MAX_DEADLINE_SECONDS)
    headers = {"x-forebay-class": "batch", "x-forebay-deadline": f"{seconds:.3f}"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": line.endpoint,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {"answer_headers": {}, "received_at": time.monotonic()},
        edge.CALLER: Caller(line.org, line.lease.batch_id, frozenset({"user"}), math.inf),
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # a line's client never goes away
        raise AssertionError("nobody sets it")

    return Request(scope, receive)


def _request_id(request: Request) -> str:
    """As the answer's header has it; empty where nothing was placed."""
    return str(request.state.answer_headers.get("x-forebay-request-id", ""))
