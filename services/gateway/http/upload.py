"""A file in a multipart form, passed on as it comes: the fields are small and bounded, the file is never here as a whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from services.common.errors import Code, StatusError, invalid
from services.gateway.http.body import BODY_SECONDS
from services.gateway.http.errors import HttpError

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16

Sink = Callable[[bytes], Awaitable[None]]


@dataclass
class Form:
    """What stood beside the file's bytes."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""


@dataclass
class _Part:
    """One part's head. `name` is empty until that has ended."""

    header: bytes = b""
    value: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    is_file: bool = False
    text: bytes = b""


class _Reader:
    """Collects what the parser says about one piece of the body; the file's bytes wait for `take`."""

    def __init__(self, boundary: bytes) -> None:
        self.form = Form()
        self.ended = False
        self._part = _Part()
        self._file: list[bytes] = []
        self._num_parts = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def take(self, data: bytes) -> bytes:
        """The file's bytes in a piece of the body."""
        self._parser.write(data)
        piece = b"".join(self._file)
        self._file.clear()
        return piece

    def _begin(self) -> None:
        self._part = _Part()
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise _bad(f"the form has more than {MAX_FIELDS} parts: send file and purpose")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]

    def _header_end(self) -> None:
        part = self._part
        part.headers[part.header.lower()] = part.value
        part.header = part.value = b""

    def _headers_end(self) -> None:
        part = self._part
        _, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        part.name = options.get(b"name", b"").decode("utf-8", "replace")
        part.is_file = part.name == "file"
        if part.is_file:
            if self.form.filename:
                raise invalid("file", "file is given twice: send one")
            self.form.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file.jsonl"
        elif part.name in self.form.fields:
            raise invalid(part.name[:64], f"{part.name[:64]!a} is given twice: send one")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._file.append(data[start:end])
            return
        self._part.text += data[start:end]
        if len(self._part.text) > MAX_FIELD_BYTES:
            raise invalid(self._part.name[:64], f"{self._part.name[:64]!a} is longer than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if not self._part.is_file:
            self.form.fields[self._part.name] = self._part.text.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True


async def read_form(request: Request, sink: Sink) -> Form:
    """The form's fields; the file's bytes have gone to `sink`, in order."""
    reader = _Reader(_boundary(request.headers.get("content-type", "")))
    try:
        async for piece in _pieces(request):
            data = reader.take(piece)
            if data:
                await sink(data)
    except FormParserError as error:
        raise _bad(f"the form can't be read: {error}") from None
    if not reader.ended:
        raise _bad("the form ends before its last boundary: send it whole")
    if not reader.form.filename:
        raise invalid("file", "there is no file: send it as the form's part `file`")
    return reader.form


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    stream = aiter(request.stream())
    try:
        while True:
            async with asyncio.timeout(BODY_SECONDS):
                piece = await anext(stream, None)
            if piece is None:
                return
            if piece:
                yield piece
    except TimeoutError:
        raise HttpError(408, f"nothing came of the body for {BODY_SECONDS:g} s: send it faster", "BODY_TOO_SLOW") from None
    except ClientDisconnect:
        raise StatusError(Code.CANCELLED, "the connection closed before the whole file had come") from None


def _boundary(header: str) -> bytes:
    media_type, options = parse_options_header(header)
    if media_type != b"multipart/form-data":
        raise HttpError(415, f"content-type {header[:64]!a} is not supported: send multipart/form-data", "UNSUPPORTED_MEDIA_TYPE")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 70:
        raise _bad("the content-type has no boundary of 1 to 70 characters")
    return boundary


def _bad(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, message, reason="INVALID_FORM")
