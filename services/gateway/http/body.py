"""A request's body: bytes within bounds, then strict JSON. Every fault is the client's and says where it is."""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from services.common.errors import Code, StatusError
from services.gateway import strict_json
from services.gateway.http.errors import HttpError

MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
_PARSE_ASIDE_BYTES = 256 << 10  # larger bodies are parsed in a thread: the event loop has streams to serve


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Refuses other media types, more than 8 MiB, and what `parse` refuses."""
    _check_media_type(request.headers.get("content-type", ""))
    data = await _read(request)
    return await asyncio.to_thread(parse, data) if len(data) > _PARSE_ASIDE_BYTES else parse(data)


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object. Refuses invalid UTF-8 and JSON, NaN and Infinity, a name given twice, lone surrogates, and deep nesting."""
    try:
        value = strict_json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    except ValueError as error:
        raise _bad(f"the body {error}") from None
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, not {_kind(value)}")
    return value


def _check_media_type(header: str) -> None:
    media_type, _, parameters = header.partition(";")
    media_type = media_type.strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise HttpError(415, f"content-type {media_type[:64]!a} is not supported: send application/json", "UNSUPPORTED_MEDIA_TYPE")
    charset = parameters.partition("charset=")[2].strip().strip('"').lower()
    if charset and charset not in ("utf-8", "utf8", "us-ascii"):
        raise HttpError(415, f"charset {charset[:32]!a} is not supported: send UTF-8", "UNSUPPORTED_MEDIA_TYPE")


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                pieces.append(piece)
    except TimeoutError:
        words = f"the body had not come whole after {BODY_SECONDS:g} s: send it faster"
        raise HttpError(408, words, "BODY_TOO_SLOW") from None
    except ClientDisconnect:
        raise StatusError(Code.CANCELLED, "the connection closed before the whole body had come") from None
    return b"".join(pieces)


def _too_large() -> HttpError:
    return HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less", "BODY_TOO_LARGE")


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _bad(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, message, reason="INVALID_JSON")
