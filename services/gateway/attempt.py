"""One attempt at running a request on a worker: how its next message is awaited, and what its failure means. Knows no message."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc

from forebay.v1 import scheduler_pb2, types_pb2
from services.common import log
from services.common.errors import Code, StatusError, from_rpc
from services.gateway.placing import Deadline

_log = log.get(__name__)

_DYING = ("ENGINE_FAILED", "ENGINE_HANGS")  # reasons of a worker that is about to go


class WorkerLost(Exception):
    """This attempt is over, the request isn't. `unreachable`: others should avoid the worker too."""

    def __init__(self, why: str, *, unreachable: bool, reason: str = "") -> None:
        super().__init__(why)
        self.unreachable = unreachable
        self.reason = reason


async def within(seconds: float, reading: Awaitable[Any]) -> Any:
    """What it brings. TimeoutError where it takes longer."""
    async with asyncio.timeout(seconds):
        return await reading


async def next_message(reading: Awaitable[Any], lease: scheduler_pb2.Lease, deadline: Deadline, where: str) -> Any:
    """What `reading` brings: the worker's next message, grpc.aio.EOF at the end. Raises its status, or WorkerLost for a TimeoutError.

    `where`: what a client is told of a deadline that has passed.
    """
    try:
        return await reading
    except TimeoutError:
        deadline.seconds_left(where)
        raise WorkerLost(f"worker {lease.worker_id} is silent", unreachable=True) from None
    except grpc.aio.AioRpcError as failure:
        raise from_rpc(failure) from None


def judge(error: StatusError, lease: scheduler_pb2.Lease, deadline: Deadline, where: str, *, running: bool) -> Exception:
    """Whether a worker's failure ends the request or only this attempt. `running`: the worker had taken it up."""
    match error.code:
        case Code.DEADLINE_EXCEEDED:
            return deadline.error(where)
        case Code.UNAVAILABLE | Code.CANCELLED:
            return WorkerLost(f"worker {lease.worker_id}: {error.message}", unreachable=True, reason=error.reason)
        case Code.INTERNAL if error.reason in _DYING:
            return WorkerLost(f"worker {lease.worker_id}: {error.message}", unreachable=True)
        case Code.RESOURCE_EXHAUSTED if running:
            return StatusError(Code.RESOURCE_EXHAUSTED, f"the answer was not read fast enough: {error.message}", reason="SLOW_READER")
        case Code.RESOURCE_EXHAUSTED | Code.FAILED_PRECONDITION | Code.ABORTED | Code.NOT_FOUND:
            return WorkerLost(f"worker {lease.worker_id}: {error.message}", unreachable=False)
        case Code.INVALID_ARGUMENT:
            return error
    return engine_error(error.message, error.reason)


def engine_error(what: str, reason: str) -> StatusError:
    """The engine's words where they are about this request (every token banned, say); else ours."""
    _log.error("engine_error", what=what, reason=reason)
    message = what if reason == "SEQUENCE_FAILED" else "the engine failed on this request: try again, and report its id if it fails again"
    return StatusError(Code.INTERNAL, message, reason="ENGINE_ERROR")


def outcome(error: BaseException | None, reason: types_pb2.FinishReason.ValueType) -> tuple[int, types_pb2.FinishReason.ValueType]:
    """gRPC status number and finish reason of a request that ended with `error`."""
    if error is None:
        return 0, reason
    if isinstance(error, StatusError):
        deadline = error.code is Code.DEADLINE_EXCEEDED
        return error.code.value[0], types_pb2.FINISH_REASON_DEADLINE if deadline else types_pb2.FINISH_REASON_UNSPECIFIED
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError | TimeoutError):
        return Code.CANCELLED.value[0], types_pb2.FINISH_REASON_CANCELLED
    return Code.INTERNAL.value[0], types_pb2.FINISH_REASON_UNSPECIFIED
