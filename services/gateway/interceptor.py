"""What holds for every call of the gRPC face: StatusErrors become statuses with details, and no client's mistake is INTERNAL."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common import log
from services.common.errors import Code, StatusError, abort

_log = log.get(__name__)


@dataclass(frozen=True)
class _Malformed:
    """Stands for a request whose bytes are no message of its type."""

    why: str


class Statuses(grpc.aio.ServerInterceptor):
    """Wraps the gateway's own methods; health and reflection keep theirs."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler with a tolerant deserializer and a typed end."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/forebay."):
            return handler
        method = handler.unary_stream or handler.unary_unary
        if method is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(request_deserializer=_tolerant(handler.request_deserializer), **{kind: _typed(method, details.method)})


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return parse


def _typed(method: Callable[[Any, Any], Awaitable[Any]], name: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, _Malformed):
                raise StatusError(
                    Code.INVALID_ARGUMENT, f"the request is not a message of this method: {request.why}", reason="MALFORMED_MESSAGE"
                )
            return await method(request, context)
        except StatusError as error:
            await abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception:  # our bug: the client gets a typed end, the log gets the trace
            _log.exception("call_failed", method=name)
            await abort(context, StatusError(Code.INTERNAL, "the gateway failed on this call: try again, and report it if it fails again"))

    return call
