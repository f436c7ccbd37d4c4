"""What a Finish costs, by how the request ended."""

import grpc
import pytest

from forebay.v1 import scheduler_pb2, types_pb2
from services.scheduler.ledger import Settlement
from services.scheduler.wire import read_settlement

USAGE = types_pb2.Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=2)


@pytest.mark.parametrize(
    ("code", "failed", "free"),
    [
        (grpc.StatusCode.OK, False, False),
        (grpc.StatusCode.CANCELLED, False, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True, False),  # its client read too slowly
        (grpc.StatusCode.UNAVAILABLE, True, True),
        (grpc.StatusCode.INTERNAL, True, True),
    ],
)
def test_what_failed_on_our_side_is_free(code: grpc.StatusCode, failed: bool, free: bool) -> None:
    request = scheduler_pb2.FinishRequest(usage=USAGE, status_code=code.value[0])
    assert read_settlement(request) == Settlement(10, 5, 2, failed=failed, free=free)


def test_no_room_at_a_worker_costs_nothing() -> None:
    request = scheduler_pb2.FinishRequest(usage=types_pb2.Usage(prompt_tokens=10), status_code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert read_settlement(request).free


def test_numbers_that_cannot_be_are_none() -> None:
    usage = types_pb2.Usage(prompt_tokens=-1, completion_tokens=-5, cached_tokens=-9)
    assert read_settlement(scheduler_pb2.FinishRequest(usage=usage)) == Settlement()
