"""gRPC interceptors that carry traces from service to service: a client span for each call, a server span below it.

OpenTelemetry's own see a cancelled or late aio stream as OK, and end none that is never read; these end with the call, whoever drops it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc

from services.common import semconv, tracing
from services.common.tracing import Span

_TRACEPARENT = "traceparent"
_OURS = "/forebay."
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""What makes a server's span an error, by the conventions."""
_SLACK_SECONDS = 0.1
"""A client's deadline is over before ours by what its call took to arrive: what it ends so close to it ends by it."""
_NO_FAULTS = frozenset({grpc.StatusCode.OK, grpc.StatusCode.CANCELLED})
"""For a client: what this side gave up is no fault of the call's; the span above says why."""


def server_interceptors(*, edge: bool) -> list[grpc.aio.ServerInterceptor]:
    """None while tracing is off. An edge begins traces; the services behind it only continue them, so that heartbeats make none."""
    return [_Server(edge=edge)] if tracing.is_on() else []


def client_interceptors() -> list[grpc.aio.ClientInterceptor]:
    """None while tracing is off. Calls of tasks without a span have none."""
    return [_UnaryUnary(), _UnaryStream()] if tracing.is_on() else []


class _Server(grpc.aio.ServerInterceptor):
    def __init__(self, *, edge: bool) -> None:
        self._edge = edge

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, in a span. Handlers are coroutines which write their answers, not generators."""
        handler = await continuation(details)
        parent = tracing.remote(next((str(value) for key, value in details.invocation_metadata or () if key == _TRACEPARENT), None))
        if handler is None or not details.method.startswith(_OURS) or not (parent or self._edge):
            return handler
        kind = next(kind for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream") if getattr(handler, kind))
        method = getattr(handler, kind)

        async def call(request: Any, context: Any) -> Any:
            with _serving(details.method, parent, context):
                return await method(request, context)

        return handler._replace(**{kind: call})


@contextmanager
def _serving(method: str, parent: Span, context: Any) -> Iterator[None]:
    span = tracing.start(method[1:], parent, kind="server", attributes=_attributes(method))
    tracing.enter(span)
    code = grpc.StatusCode.UNKNOWN
    try:
        yield
        code = _code(context.code())
    except grpc.aio.AbortError:
        code = _code(context.code())
        raise
    except asyncio.CancelledError:
        left = context.time_remaining()
        code = grpc.StatusCode.CANCELLED if left is None or left > _SLACK_SECONDS else grpc.StatusCode.DEADLINE_EXCEEDED
        raise
    finally:
        span.set({semconv.RPC_RESPONSE_STATUS_CODE: code.name})
        span.end(code.name if code in _SERVER_FAULTS else "")


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """The call, in a span."""
        return await _called(continuation, client_call_details, request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """The call, in a span."""
        return await _called(continuation, client_call_details, request)


async def _called(continuation: Any, details: Any, request: Any) -> Any:
    parent = tracing.current()
    if not parent:
        return await continuation(details, request)
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    span = tracing.start(method[1:], parent, kind="client", attributes=_attributes(method))
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (_TRACEPARENT, span.traceparent))
    try:
        call = await continuation(details._replace(metadata=metadata), request)
    except BaseException as error:
        span.end(type(error).__name__)
        raise
    call.add_done_callback(partial(_ended, span))
    return call


def _ended(span: Span, call: Any) -> None:
    code = _now(call.code()) or grpc.StatusCode.UNKNOWN
    span.set({semconv.RPC_RESPONSE_STATUS_CODE: code.name})
    span.end("" if code in _NO_FAULTS else code.name)


def _now(answer: Coroutine[Any, Any, grpc.StatusCode]) -> grpc.StatusCode | None:
    """What a coroutine of a call that is over returns, without a task for it."""
    try:
        answer.send(None)
    except StopIteration as returned:
        code: grpc.StatusCode = returned.value
        return code
    answer.close()
    return None


def _attributes(method: str) -> dict[str, tracing.Value]:
    return {semconv.RPC_SYSTEM_NAME: semconv.GRPC, semconv.RPC_METHOD: method[1:]}


def _code(code: Any) -> grpc.StatusCode:
    """A context's code, which may be a number, a StatusCode or nothing."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == (code or 0)), grpc.StatusCode.UNKNOWN)
