"""An error crosses the wire with its code, words, blamed field and retry time."""

import grpc
import pytest
from google.rpc import error_details_pb2

from forebay.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common import errors, rpc


class _Raising(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, error: errors.StatusError) -> None:
        self._error = error

    async def Finish(self, request, context):
        await errors.abort(context, self._error)


async def _over_the_wire(error: errors.StatusError) -> errors.StatusError:
    server = rpc.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(_Raising(error), server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scheduler_pb2_grpc.SchedulerServiceStub(channel).Finish(scheduler_pb2.FinishRequest())
            return errors.from_rpc(caught.value)
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    "error",
    [
        errors.invalid("max_tokens", "max_tokens is -1; it must be at least 1"),
        errors.unavailable("no worker serves tiny@fp32", retry_after_seconds=2.5, reason="NO_WORKER"),
        errors.StatusError(errors.Code.NOT_FOUND, "no model named x"),
        errors.StatusError(errors.Code.DEADLINE_EXCEEDED, "ünïcode survives"),
        errors.StatusError(
            errors.Code.RESOURCE_EXHAUSTED,
            "over the quota",
            retry_after_seconds=1.5,
            details=[error_details_pb2.QuotaFailure(), types_pb2.QuotaState(tokens_limit=5)],
        ),
    ],
    ids=lambda error: error.code.name,
)
async def test_every_part_arrives(error: errors.StatusError) -> None:
    received = await _over_the_wire(error)
    assert (received.code, received.message, received.reason) == (error.code, error.message, error.reason)
    assert received.violations == error.violations
    assert received.retry_after_seconds == error.retry_after_seconds
    assert received.details == error.details


async def test_a_plain_status_without_details_is_kept() -> None:
    async with rpc.channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler_pb2_grpc.SchedulerServiceStub(channel).Finish(scheduler_pb2.FinishRequest(), timeout=5)
    assert errors.from_rpc(caught.value).code is errors.Code.UNAVAILABLE
