"""A job's lines: how a file is cut into parts of whole lines, and what a line must say. Pure: knows no request and no store."""

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.v1 import batch_pb2
from services.common.errors import invalid
from services.gateway import strict_json
from services.gateway.field import shown

ENDPOINTS: Mapping[str, str] = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/embeddings": "embeddings"}
"""What lines may call -> the HTTP face's method that answers it."""
MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100
"""Told of one job."""
_PART_BYTES = 64 << 10
_FIELDS = ("custom_id", "method", "url", "body")
_TIERS = (None, "auto", "flex", "batch")


@dataclass(frozen=True)
class Part:
    """Whole lines of a file. `first_line`: the number of the first, from 0."""

    number: int
    text: str
    first_line: int


class Parts:
    """Cuts bytes as they come into parts of about 64 KiB. INVALID_ARGUMENT names the line that is too long, or no UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._line = 0
        self.num_parts = 0

    def feed(self, data: bytes) -> Iterator[Part]:
        """The parts that are whole now."""
        for start in range(0, len(data), _PART_BYTES):
            yield from self._cut(data[start : start + _PART_BYTES], final=False)

    def end(self) -> Iterator[Part]:
        """The last part."""
        yield from self._cut(b"", final=True)
        if not self.num_parts:
            raise invalid("file", "the file is empty: send JSON lines")

    def _cut(self, data: bytes, *, final: bool) -> Iterator[Part]:
        try:
            self._text += self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            line = self._line + self._text.count("\n") + data[: error.start].count(b"\n") + 1
            raise invalid("file", f"line {line} of the file is not UTF-8: byte 0x{error.object[error.start]:02x}") from None
        end = len(self._text) if final else self._text.rfind("\n") + 1
        if end and (final or end >= _PART_BYTES):
            part = Part(self.num_parts, self._text[:end], self._line)
            self._text = self._text[end:]
            self._check_lengths(part)
            self.num_parts += 1
            self._line += part.text.count("\n")
            yield part
        elif len(self._text) - end > MAX_LINE_BYTES:
            raise self._too_long(self._line + self._text.count("\n"))

    def _check_lengths(self, part: Part) -> None:
        for number, line in enumerate(part.text.split("\n") if len(part.text) > _PART_BYTES else ()):
            if len(line.encode()) > MAX_LINE_BYTES:
                raise self._too_long(part.first_line + number)

    def _too_long(self, line: int) -> Exception:
        return invalid("file", f"line {line + 1} of the file is longer than {MAX_LINE_BYTES} bytes: send shorter ones")


class LineCheck:
    """Checks a job's lines one after another, and remembers what is wrong with them."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen: dict[str, int] = {}
        self._empty: list[int] = []
        self._line = 0
        self.num_lines = 0
        self.errors: list[batch_pb2.BatchError] = []

    def part(self, text: str) -> None:
        """The next part of the file, of whole lines."""
        for line in text.removesuffix("\n").split("\n"):
            self._check(line, self._line)
            self._line += 1

    def end(self) -> None:
        """There are no more. Empty lines at the end are none."""
        if not self.num_lines:
            self._wrong("empty_file", "the file has no lines: send one request each", line=-1)
        if self.num_lines > MAX_LINES:
            self._wrong("too_many_lines", f"the file has {self.num_lines} lines; a job may have at most {MAX_LINES}: split it", line=-1)

    def _check(self, text: str, number: int) -> None:
        if not text.strip():
            self._empty.append(number)
            return
        for empty in self._empty:
            self._wrong("invalid_json_line", "the line is empty: leave it out", line=empty)
        self._empty.clear()
        self.num_lines = number + 1
        if number < MAX_LINES and len(self.errors) < MAX_ERRORS:
            self._check_request(text, number)

    def _check_request(self, text: str, number: int) -> None:
        try:
            request = parse(text)
        except ValueError as error:
            return self._wrong("invalid_json_line", f"the line {error}", line=number)
        for field in request:
            if field not in _FIELDS:
                return self._wrong(
                    "invalid_request", f"{field[:64]!a} is no field of a line: it has {', '.join(_FIELDS)}", field[:64], number
                )
        self._check_id(request.get("custom_id"), number)
        if request.get("method") != "POST":
            return self._wrong("invalid_method", f"method is {shown(request.get('method'))}: it must be POST", "method", number)
        url, body = request.get("url"), request.get("body")
        if url != self._endpoint:
            words = f"url is {shown(url)}: it must be the job's endpoint, {self._endpoint}"
            return self._wrong("invalid_url", words, "url", number)
        if not isinstance(body, dict):
            return self._wrong("invalid_request", f"body is {shown(body)}: it must be an object", "body", number)
        return self._check_body(body, number)

    def _check_id(self, custom_id: object, number: int) -> None:
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            words = f"custom_id is {shown(custom_id)}: it must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            self._wrong("invalid_custom_id", words, "custom_id", number)
        elif (first := self._seen.setdefault(custom_id, number)) != number:
            words = f"custom_id {shown(custom_id)} is that of line {first + 1}, too: each line needs its own"
            self._wrong("duplicate_custom_id", words, "custom_id", number)

    def _check_body(self, body: Mapping[str, Any], number: int) -> None:
        if body.get("stream"):
            self._wrong("invalid_request", "stream is not for jobs: leave it out", "body.stream", number)
        tier = body.get("service_tier")
        if tier not in _TIERS:
            words = f"service_tier is {shown(tier)}: jobs run in the class batch, so leave it out"
            self._wrong("invalid_request", words, "body.service_tier", number)

    def _wrong(self, code: str, message: str, param: str = "", line: int = 0) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(batch_pb2.BatchError(code=code, message=message, param=param, line=line + 1))


def parse(text: str) -> dict[str, Any]:
    """A line as the object that it is. ValueError with words that go on after "the line"."""
    value = strict_json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"is {shown(value)}: it must be a JSON object")
    return value
