"""/v1/files: the files of jobs, as OpenAI has them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.v1 import batch_pb2
from services.common import log
from services.common.errors import Code, StatusError, invalid
from services.gateway.auth import Caller
from services.gateway.batches import MAX_PAGE, PURPOSES, Jobs
from services.gateway.field import shown
from services.gateway.gateway import Gateway
from services.gateway.http import errors, openapi_batches, sse
from services.gateway.http.errors import HttpError
from services.gateway.http.upload import Form, read_form

_log = log.get(__name__)

Authenticate = Callable[[Request], Awaitable[Caller]]
_FULL = ("FILE_TOO_LARGE", "STORAGE_FULL", "TOO_MANY_FILES")
_OUTPUT = "batch_output"
_FIELDS = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))


def add_routes(app: FastAPI, gateway: Gateway, authenticate: Authenticate) -> None:
    """Puts the endpoints into the application."""
    face = FilesFace(gateway, authenticate)
    app.add_api_route("/v1/files", face.create_file, methods=["POST"], **openapi_batches.CREATE_FILE)
    app.add_api_route("/v1/files", face.list_files, methods=["GET"], **openapi_batches.FILES)
    app.add_api_route("/v1/files/{file_id}", face.file, methods=["GET"], **openapi_batches.FILE)
    app.add_api_route("/v1/files/{file_id}", face.delete_file, methods=["DELETE"], **openapi_batches.DELETE_FILE)
    app.add_api_route("/v1/files/{file_id}/content", face.file_content, methods=["GET"], **openapi_batches.CONTENT)


class FilesFace:
    """The endpoints."""

    def __init__(self, gateway: Gateway, authenticate: Authenticate) -> None:
        self._authenticate = authenticate
        self._jobs = Jobs(gateway.mesh)
        self._patience = gateway.slow_reader_seconds

    async def create_file(self, request: Request) -> Response:
        """POST /v1/files."""
        upload = self._jobs.upload((await self._authenticate(request)).org)
        try:
            form = await read_form(request, upload.feed)
            purpose = _purpose(form)
            file = await upload.end(form.filename, purpose, _keep_seconds(form))
        except StatusError as error:
            await upload.give_up()
            if error.reason in _FULL:  # not 429: what is too much now is too much in a second, too
                raise HttpError(413, error.message, error.reason) from None
            raise
        return json_response(file_object(file))

    async def list_files(self, request: Request) -> Response:
        """GET /v1/files."""
        caller = await self._authenticate(request)
        after, limit = page(request)
        purpose = request.query_params.get("purpose", "")
        if purpose not in ("", *PURPOSES, _OUTPUT):
            raise invalid("purpose", f"purpose is {shown(purpose)}: files are there for {', '.join((*PURPOSES, _OUTPUT))}")
        listed = await self._jobs.files(caller.org, after, limit, purpose)
        return json_response(list_object([file_object(file) for file in listed.files], more=listed.has_more))

    async def file(self, request: Request) -> Response:
        """GET /v1/files/{file_id}."""
        caller = await self._authenticate(request)
        return json_response(file_object(await self._jobs.file(caller.org, request.path_params["file_id"])))

    async def delete_file(self, request: Request) -> Response:
        """DELETE /v1/files/{file_id}."""
        caller, file_id = await self._authenticate(request), request.path_params["file_id"]
        await self._jobs.delete_file(caller.org, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def file_content(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content."""
        caller = await self._authenticate(request)
        return Content(self._jobs.content(caller.org, request.path_params["file_id"]), self._patience)


class Content(Response):
    """A file as it comes from the scheduler. An error before its first piece is a plain error answer; a later one breaks the connection."""

    media_type = "application/jsonl"

    def __init__(self, pieces: AsyncIterator[str], slow_reader_seconds: float) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._pieces = pieces
        self._patience = slow_reader_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await sse.until_disconnect(receive, self._stream(scope, receive, send))
        except StatusError as error:
            if error.code is not Code.CANCELLED:  # unfinished, so that nobody takes a part for the whole
                raise
        except TimeoutError:
            _log.info("slow_reader_given_up", seconds=self._patience)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(piece: str, more: bool = True) -> None:
            async with asyncio.timeout(self._patience):
                await send({"type": "http.response.body", "body": piece.encode(), "more_body": more})

        assert isinstance(self._pieces, AsyncGenerator)
        async with aclosing(self._pieces) as pieces:
            try:
                first = await anext(pieces)
            except StatusError as error:
                await errors.response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await put(first)
            async for piece in pieces:
                await put(piece)
            await put("", more=False)


def page(request: Request) -> tuple[str, int]:
    """after and limit of a list. Lists are newest first alone."""
    order, limit = request.query_params.get("order", "desc"), request.query_params.get("limit", "20")
    if order != "desc":
        raise invalid("order", f"order is {shown(order)}: lists are newest first, desc")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:6]) <= MAX_PAGE:
        raise invalid("limit", f"limit is {shown(limit)}: it must be a whole number, 1 to {MAX_PAGE}")
    return request.query_params.get("after", ""), int(limit)


def list_object(objects: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """A page as OpenAI has it."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": more}


def file_object(file: batch_pb2.StoredFile) -> dict[str, Any]:
    """OpenAI's file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def json_response(value: Mapping[str, Any]) -> Response:
    """The answer's JSON."""
    return Response(orjson.dumps(value), media_type="application/json")


def _purpose(form: Form) -> str:
    for name in form.fields:
        if name not in _FIELDS:
            raise invalid(name[:64], f"{name[:64]!a} is not a field of a file: there are file, purpose and expires_after")
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        raise invalid("purpose", f"purpose is {shown(purpose)}: it must be one of {', '.join(PURPOSES)}")
    return purpose


def _keep_seconds(form: Form) -> int:
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        raise invalid("expires_after", f"expires_after.anchor is {shown(anchor)}: it must be created_at")
    if seconds is None or not seconds.isascii() or not seconds.isdecimal() or not int(seconds[:9]) >= 1:
        raise invalid("expires_after", f"expires_after.seconds is {shown(seconds)}: it must be a whole number of seconds")
    return int(seconds[:9])
