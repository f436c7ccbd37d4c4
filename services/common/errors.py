"""The one exception that a service answers with: a status code, words for a person, details for a program.

Both faces of the gateway and every internal RPC render it; nothing else decides what a client may read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

Code = grpc.StatusCode


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that can't be honoured."""

    field: str
    description: str


class StatusError(Exception):
    """An outcome that the caller must see. `code` is a gRPC status; the HTTP face maps it. `details` go along as they are."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: Sequence[FieldViolation] = (),
        retry_after_seconds: float | None = None,
        details: Sequence[Message] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason or code.name
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds
        self.details = tuple(detail if isinstance(detail, any_pb2.Any) else _packed(detail) for detail in details)

    def __repr__(self) -> str:
        return f"StatusError({self.code.name}, {self.message!r})"


def _packed(detail: Message) -> any_pb2.Any:
    box = any_pb2.Any()
    box.Pack(detail)
    return box


def invalid(field: str, message: str) -> StatusError:
    """An INVALID_ARGUMENT that blames one field. `message` names the value, the limit and the next step."""
    return StatusError(Code.INVALID_ARGUMENT, message, reason="INVALID_FIELD", violations=[FieldViolation(field, message)])


def unavailable(message: str, retry_after_seconds: float = 1.0, reason: str = "") -> StatusError:
    """An UNAVAILABLE that says when to come back."""
    return StatusError(Code.UNAVAILABLE, message, reason=reason, retry_after_seconds=retry_after_seconds)


def to_status(error: StatusError) -> status_pb2.Status:
    """The google.rpc.Status of an error, with ErrorInfo, BadRequest and RetryInfo where they say something, then its own details."""
    status = status_pb2.Status(code=getattr(code_pb2, error.code.name), message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="forebay"))
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        status.details.add().Pack(bad)
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status.details.extend(error.details)
    return status


def from_rpc(error: grpc.aio.AioRpcError) -> StatusError:
    """The StatusError that a peer sent; a plain status keeps its code and words."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has all that from_call reads
    except ValueError:  # details that contradict the status: keep the status
        status = None
    reason, violations, retry = "", [], None
    others: list[any_pb2.Any] = []
    for detail in status.details if status else ():
        info, bad, delay = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad):
            violations = [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToMilliseconds() / 1000
        else:
            others.append(detail)
    words = error.details() or ""
    return StatusError(error.code(), words, reason=reason, violations=violations, retry_after_seconds=retry, details=others)


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: StatusError) -> NoReturn:
    """Ends a call of ours with this error and its details."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returns never")
