"""Spans of RPCs over real servers: every call has one on each side, they end however it ends, and they say how."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from services.common import rpc, semconv, tracing
from tests.spans import Recorded, recorded

STREAM, UNARY, PROBE = "/forebay.test.Echo/Stream", "/forebay.test.Echo/Unary", "/grpc.test.Probe/Check"


async def _stream(request: bytes, context: Any) -> None:
    """Writes as many messages as the request has bytes; then what its last byte says."""
    for _ in request:
        await context.write(b"word")
    match request[-1:]:
        case b"!":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        case b"~":
            await asyncio.Event().wait()
        case b"?":
            raise ZeroDivisionError


async def _unary(request: bytes, context: Any) -> bytes:
    if request == b"!":
        await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
    return tracing.current().traceparent.encode()


@asynccontextmanager
async def serving(*, edge: bool = False) -> AsyncIterator[tuple[Recorded, grpc.aio.Channel]]:
    with recorded() as spans:
        server = rpc.server(edge=edge)
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(_stream), "Unary": grpc.unary_unary_rpc_method_handler(_unary)}
        probes = {"Check": grpc.unary_unary_rpc_method_handler(_unary)}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("forebay.test.Echo", handlers),
                grpc.method_handlers_generic_handler("grpc.test.Probe", probes),
            )
        )
        port = rpc.bind(server, "127.0.0.1:0")
        await server.start()
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield spans, channel
        await server.stop(None)


def codes(spans: Recorded) -> dict[SpanKind, tuple[str, StatusCode]]:
    return {span.kind: (span.attributes[semconv.RPC_RESPONSE_STATUS_CODE], span.status.status_code) for span in spans.named(STREAM[1:])}


async def test_a_call_is_a_client_span_with_a_server_span_below() -> None:
    async with serving() as (spans, channel):
        root = tracing.start("request")
        seen = await tracing.inside(root, lambda: channel.unary_unary(UNARY)(b"hello"))
        root.end()
        await spans.all_ended(3)
    server, client, request = sorted(spans.ended, key=lambda span: [SpanKind.SERVER, SpanKind.CLIENT, SpanKind.INTERNAL].index(span.kind))
    assert client.parent.span_id == request.context.span_id
    assert server.parent.span_id == client.context.span_id
    assert seen.decode().split("-")[2] == f"{server.context.span_id:016x}"
    for span in (server, client):
        assert span.name == "forebay.test.Echo/Unary"
        assert span.attributes[semconv.RPC_SYSTEM_NAME] == "grpc"
        assert span.attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "OK"


async def test_calls_of_a_task_without_a_span_have_none() -> None:
    async with serving() as (spans, channel):
        assert await channel.unary_unary(UNARY)(b"heartbeat") == b""
        assert await channel.unary_unary(PROBE)(b"health") == b""
    assert spans.num_started == 0


async def test_an_edge_begins_traces_but_not_for_probes() -> None:
    async with serving(edge=True) as (spans, channel):
        await channel.unary_unary(PROBE)(b"health")
        assert await channel.unary_unary(UNARY)(b"work") != b""
        await spans.all_ended(1)
    assert spans.ended[0].parent is None


@pytest.mark.parametrize(
    ("request_", "client", "server"),
    [
        (b"abc", ("OK", StatusCode.UNSET), ("OK", StatusCode.UNSET)),
        (b"ab!", ("RESOURCE_EXHAUSTED", StatusCode.ERROR), ("RESOURCE_EXHAUSTED", StatusCode.UNSET)),
        (b"ab?", ("UNKNOWN", StatusCode.ERROR), ("UNKNOWN", StatusCode.ERROR)),
        (b"ab~", ("DEADLINE_EXCEEDED", StatusCode.ERROR), ("DEADLINE_EXCEEDED", StatusCode.ERROR)),
    ],
    ids=["whole", "aborted", "failed", "late"],
)
async def test_both_sides_say_how_a_stream_ended(request_: bytes, client: tuple[str, StatusCode], server: tuple[str, StatusCode]) -> None:
    async with serving() as (spans, channel):
        root = tracing.start("request")
        call = tracing.inside(root, lambda: channel.unary_stream(STREAM)(request_, timeout=0.3 if request_[-1:] == b"~" else 20))
        with_status = await asyncio.gather(_read_all(call), return_exceptions=True)
        root.end()
        await spans.all_ended(3)
    assert with_status
    assert codes(spans) == {SpanKind.CLIENT: client, SpanKind.SERVER: server}


async def _read_all(call: Any) -> list[bytes]:
    return [message async for message in call]


async def _cancelled(call: Any) -> None:
    await call.read()
    call.cancel()


async def _cancelled_by_another_task(call: Any) -> None:
    await call.read()
    await asyncio.create_task(_cancel(call))


async def _cancel(call: Any) -> None:
    call.cancel()


async def _never_read(call: Any) -> None:
    await call.initial_metadata()
    call.cancel()


async def _dropped_at_once(call: Any) -> None:
    call.cancel()


async def _generator_closed_elsewhere(call: Any) -> None:
    async def generator() -> AsyncIterator[bytes]:
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    stream = generator()
    await anext(stream)
    await asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]  # a generator has it


LEAVINGS = (_cancelled, _cancelled_by_another_task, _never_read, _dropped_at_once, _generator_closed_elsewhere)


@pytest.mark.timeout(120)
async def test_a_thousand_streams_that_are_left_end_every_span(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as (spans, channel):

        async def one(number: int) -> None:
            root = tracing.start("request")
            call = tracing.inside(root, lambda: channel.unary_stream(STREAM)(b"ab~"))
            await LEAVINGS[number % len(LEAVINGS)](call)
            root.end()

        for begun in range(0, 1000, 50):
            await asyncio.gather(*(one(begun + number) for number in range(50)))
        gc.collect()
        await spans.all_ended(2000)
        num_client = [span for span in spans.named(STREAM[1:]) if span.kind is SpanKind.CLIENT]
    assert len(spans.named("request")) == 1000
    assert len(num_client) == 1000
    told = {
        span.attributes.get(semconv.RPC_RESPONSE_STATUS_CODE) or span.attributes[semconv.ERROR_TYPE] for span in spans.named(STREAM[1:])
    }
    assert told <= {"CANCELLED", "CancelledError"}
    roots = {span.context.trace_id for span in spans.named("request")}
    assert {span.context.trace_id for span in spans.named(STREAM[1:])} <= roots
    assert "detach" not in caplog.text.lower()
