"""Carries traces from service to service over gRPC: a client span for each call, a server span below it.

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


def traced(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The channel; while tracing is on, its calls of tasks with a span have one below it.

    Not by interceptors: gRPC runs a call with any in a task more, and hands each message through two generators.
    """
    for kind in ("unary_unary", "unary_stream") if tracing.is_on() else ():
        setattr(channel, kind, partial(_traced, getattr(channel, kind)))
    return channel


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


def _traced(make: Callable[..., Callable[..., Any]], method: str, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """What a stub calls for this method."""
    begin, attributes = make(method, *arguments, **options), _attributes(method)

    def call(request: Any, *, metadata: Any = None, **options: Any) -> Any:
        parent = tracing.current()
        if not parent:
            return begin(request, metadata=metadata, **options)
        span = tracing.start(method[1:], parent, kind="client", attributes=attributes)
        try:
            begun = begin(request, metadata=grpc.aio.Metadata(*(metadata or ()), (_TRACEPARENT, span.traceparent)), **options)
        except BaseException as error:
            span.end(type(error).__name__)
            raise
        begun.add_done_callback(partial(_ended, span))
        return begun

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
