"""What holds for every call of the gRPC face: a caller is known and a place is taken before the message is read, let alone parsed.

StatusErrors become statuses with details, and no client's mistake is INTERNAL.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from services.common import log
from services.common.errors import Code, StatusError, abort
from services.gateway.auth import Caller
from services.gateway.gateway import Gateway

_log = log.get(__name__)

MESSAGE_SECONDS = 30.0
_FAILED = StatusError(Code.INTERNAL, "the gateway failed on this call: try again, and report it if it fails again")
_Take = Callable[[AsyncIterator[bytes], Callable[[bytes], Any]], Awaitable[Any]]
_caller: ContextVar[Caller] = ContextVar("caller")
_received_at: ContextVar[float] = ContextVar("received_at")


def caller() -> Caller:
    """Whose call this is."""
    return _caller.get()


def received_at() -> float:
    """When this call came, by the process's monotonic clock."""
    return _received_at.get()


class Edge(grpc.aio.ServerInterceptor):
    """Wraps the gateway's own methods; health and reflection keep theirs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, as one that takes a stream: such a one is called before the message is read."""
        handler = await continuation(details)
        method = (handler.unary_stream or handler.unary_unary or handler.stream_unary) if handler is not None else None
        if method is None or not details.method.startswith("/forebay."):
            return handler
        take = _each if handler.request_streaming else _only
        call = self._wrapped(method, handler.request_deserializer, take, details.method)
        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        return handler._replace(request_streaming=True, request_deserializer=None, unary_stream=None, unary_unary=None, **{kind: call})

    def _wrapped(
        self, method: Callable[[Any, Any], Awaitable[Any]], parse: Callable[[bytes], Any], take: _Take, name: str
    ) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Any]]:
        async def call(messages: AsyncIterator[bytes], context: Any) -> Any:
            _received_at.set(time.monotonic())
            status = Code.CANCELLED
            try:
                _caller.set(await self._authenticate(context, name))
                with self._gateway.calls.one():
                    answer = await method(await take(messages, parse), context)
                status = Code.OK
                return answer
            except StatusError as refused:
                error, status = refused, refused.code
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception:  # our bug: the client gets a typed end, the log gets the trace
                _log.exception("call_failed", method=name)
                error, status = _FAILED, Code.INTERNAL
            finally:  # before the answer goes out: who has it finds it counted
                self._gateway.metrics.calls.labels("grpc", name.rpartition("/")[2], status.name).inc()
            return await _end(context, error)

        return call

    async def _authenticate(self, context: Any, method: str) -> Caller:
        """The caller; two tokens are as bad as none. Inference is for users; AdminService says itself who may do what."""
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(given) > 1:
            raise StatusError(Code.UNAUTHENTICATED, f"authorization is given {len(given)} times: send one", reason="AMBIGUOUS_TOKEN")
        caller = await self._gateway.authenticator.authenticate(given[0] if given else None)
        if method.startswith("/forebay.v1.InferenceService/"):
            caller.require("user")
        return caller


async def _each(messages: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    """The call's messages, as they come."""

    async def parsed() -> AsyncIterator[Any]:
        message = await _next(messages, parse)
        while message is not None:
            yield message
            message = await _next(messages, parse)

    return parsed()


async def _only(messages: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
    """The call's one message."""
    message = await _next(messages, parse)
    if message is None:
        raise StatusError(Code.INVALID_ARGUMENT, "the call has no message", reason="MALFORMED_MESSAGE")
    return message


async def _next(messages: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
    """The next message; None: there is none."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return parse(await anext(messages))
    except TimeoutError:
        words = f"the request had not come whole after {MESSAGE_SECONDS:g} s: send it faster"
        raise StatusError(Code.DEADLINE_EXCEEDED, words, reason="MESSAGE_TOO_SLOW") from None
    except StopAsyncIteration:
        return None
    except DecodeError as error:
        words = f"the request is not a message of this method: {error}"
        raise StatusError(Code.INVALID_ARGUMENT, words, reason="MALFORMED_MESSAGE") from None


async def _end(context: Any, error: StatusError) -> NoReturn:
    try:
        await abort(context, error)
    except grpc.aio.InternalError:  # cancelled, or its deadline passed: gRPC ends a cancelled handler quietly
        _log.debug("call_ended_before_its_error", status=error.code.name)
        raise asyncio.CancelledError from None
