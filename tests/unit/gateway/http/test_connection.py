"""Connections of the OpenAI face: what isn't HTTP is told so in JSON, what never comes is closed, what is being answered is left alone."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from services.common.process import HttpServer
from services.gateway.http.connection import Connection, ConnectionLimits

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\n"


class Server:
    """An app on connections with short limits."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.port = 0
        self.release = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.lost = asyncio.Event()  # a connection has ended
        self.latest: Connection

    def app(self) -> Starlette:
        async def echo(request: Request) -> Response:
            try:
                return Response(await request.body())
            except ClientDisconnect:
                self.disconnected.set()
                raise

        async def refuses(_: Request) -> Response:
            return PlainTextResponse("no", 401)

        async def large(_: Request) -> Response:
            return Response(b"x" * (32 << 20))

        async def stream(_: Request) -> Response:
            async def pieces() -> AsyncIterator[bytes]:
                yield b"begun"
                await self.release.wait()
                yield b" and ended"

            return StreamingResponse(pieces())

        return Starlette(routes=[Route(f"/{f.__name__}", f, methods=["GET", "POST"]) for f in (echo, refuses, large, stream)])

    def connection(self, **of_uvicorn: Any) -> Connection:
        server = self

        class Watched(Connection):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                server.lost.set()

        self.latest = Watched(self.limits, **of_uvicorn)
        return self.latest

    async def connect(self, data: bytes = b"", limit: int = 1 << 16) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        writer.write(data)
        return reader, writer

    async def answer_to(self, data: bytes) -> bytes:
        """All that comes until the server closes."""
        reader, writer = await self.connect(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer

    async def head_time(self) -> None:
        """As long as a connection that sends nothing is kept."""
        assert await self.answer_to(b"") == b""


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Server]:
    server = Server(ConnectionLimits(**limits))
    http = HttpServer(server.app(), "127.0.0.1:0", drain_seconds=1, protocol=server.connection)
    server.port = await http.start()
    try:
        yield server
    finally:
        server.release.set()
        await http.stop()


def refusal(answer: bytes) -> tuple[int, str, str]:
    """Status, code and message of an error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert (headers["content-type"], headers["connection"], len(headers["x-request-id"])) == ("application/json", "close", 32)
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(status.split()[1]), error["code"], error["message"]


@pytest.mark.parametrize(
    ("data", "status", "code", "words"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed_http", "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_http", "without TLS"),
        (HEAD + b"authorization : Bearer secret\r\n\r\n", 400, "malformed_http", "illegal header line"),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", 400, "malformed_http", "conflicting Content-Length"),
        (HEAD + b"content-length: -1\r\n\r\n", 400, "malformed_http", "bad Content-Length"),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 501, "malformed_http", "chunked"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "malformed_http", "illegal chunk header"),
        (b"POST /echo HTTP/1.1\r\n\r\n", 400, "malformed_http", "Host"),
        (HEAD + b"x-request-id: " + b"x" * (8 << 20), 431, "head_too_large", "65536 bytes"),
        (HEAD + b"a: b\r\n" * 700_000, 431, "head_too_large", "65536 bytes"),
    ],
)
async def test_what_is_no_http_is_told_so_in_json(data: bytes, status: int, code: str, words: str) -> None:
    async with serving() as server:
        got = refusal(await server.answer_to(data))
    assert got[:2] == (status, code)
    assert words in got[2]
    assert "secret" not in got[2]


async def test_who_waits_for_a_body_hears_of_its_broken_framing() -> None:
    async with serving() as server:
        assert refusal(await server.answer_to(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nabcdef\r\n"))[0] == 400
        await asyncio.wait_for(server.disconnected.wait(), 20)


async def test_an_answer_is_whole_though_garbage_follows() -> None:
    async with serving(idle_seconds=0.1) as server:
        reader, writer = await server.connect(b"POST /refuses HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\nno")
        writer.write(b"zz\r\n")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        both = await server.answer_to(HEAD + b"content-length: 2\r\n\r\nhi" + b"nonsense\r\n\r\n")
        assert both.startswith(b"HTTP/1.1 200 ")
        assert refusal(both[both.index(b"\r\n\r\nhi") + 6 :])[:2] == (400, "malformed_http")


@pytest.mark.parametrize("before", [b"", HEAD + b"content-length: 2\r\n\r\nhi"], ids=["first", "later"])
async def test_a_head_that_comes_a_byte_at_a_time_is_given_up(before: bytes) -> None:
    async with serving(head_seconds=0.2) as server:
        reader, writer = await server.connect(before)
        if before:
            await reader.readuntil(b"\r\n\r\nhi")
        writer.write(HEAD)
        reading = asyncio.create_task(reader.read())
        while not (await asyncio.wait({reading}, timeout=0.02))[0]:
            writer.write(b"x")
        writer.close()
        status, code, message = refusal(reading.result())
    assert (status, code) == (408, "head_too_slow")
    assert "0.2 s" in message


async def test_a_connection_that_asks_nothing_is_closed_without_a_word() -> None:
    async with serving(head_seconds=0.05) as server:
        assert await server.answer_to(b"") == b""
    async with serving(idle_seconds=0.05) as server:
        assert (await server.answer_to(HEAD + b"content-length: 2\r\n\r\nhi")).endswith(b"\r\n\r\nhi")


async def test_the_rest_of_a_body_that_has_its_answer_does_not_come_for_ever() -> None:
    async with serving(head_seconds=0.2) as server:
        reader, writer = await server.connect(b"POST /refuses HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nno")
        reading = asyncio.create_task(reader.read())
        while not (await asyncio.wait({reading}, timeout=0.02))[0]:
            writer.write(b"x")
        writer.close()
        assert reading.result() == b""


async def test_what_is_being_answered_is_left_alone() -> None:
    async with serving(head_seconds=0.05, idle_seconds=0.05) as server:
        reader, writer = await server.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"begun")
        upload_reader, upload_writer = await server.connect(HEAD + b"content-length: 4\r\n\r\nha")
        for _ in range(4):
            await server.head_time()
        server.release.set()
        upload_writer.write(b"lf")
        assert b" and ended" in await asyncio.wait_for(reader.read(), 20)
        assert (await asyncio.wait_for(upload_reader.read(), 20)).endswith(b"\r\n\r\nhalf")
        for each in (writer, upload_writer):
            each.close()


async def test_connections_beyond_the_bound_are_told_to_come_back() -> None:
    request = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(max_connections=2) as server:
        first, second = await server.connect(request), await server.connect(request)
        for reader, _ in (first, second):
            await reader.readuntil(b"begun")
        answer = await server.answer_to(request)
        assert refusal(answer)[:2] == (503, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in answer
        second[1].close()
        freed = await until_served(server)
        server.release.set()
        assert await first[0].readuntil(b" and ended")
        for _, writer in (first, freed):
            writer.close()


async def until_served(server: Server) -> Streams:
    """A connection that got its place."""
    while True:
        reader, writer = await server.connect(HEAD + b"content-length: 2\r\n\r\nhi")
        if (await reader.readline()).startswith(b"HTTP/1.1 200 "):
            return reader, writer
        writer.close()


async def test_a_whole_answer_that_nobody_takes_is_dropped_and_a_slow_reader_is_not() -> None:
    request = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(idle_seconds=0.05) as server:
        _, writer = await server.connect(request, limit=1024)
        await asyncio.wait_for(server.lost.wait(), 20)
        writer.close()
    async with serving() as server:
        reader, writer = await server.connect(request, limit=1024)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(2):
            server.latest.timeout_keep_alive_handler()
            await reader.readexactly(16 << 20)
        writer.close()
