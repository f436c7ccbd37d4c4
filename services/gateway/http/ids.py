"""Request ids and answer headers: the client's x-request-id is echoed and is a label only; our own id stands beside it."""

from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import StatusError, invalid
from services.gateway.http import errors
from services.gateway.validator import validate_label


class AnswerHeaders:
    """Middleware: every answer, errors included, carries x-request-id and what the handlers put into `of(request)`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        scope.setdefault("state", {})["answer_headers"] = headers

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        try:
            label = client_id(Headers(scope=scope))
        except StatusError as error:
            await errors.response(error)(scope, receive, put)
            return
        if label:
            headers["x-request-id"] = label
        await self._app(scope, receive, put)


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
