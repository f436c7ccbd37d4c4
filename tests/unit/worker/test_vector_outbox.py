"""One stream's vectors: bounded messages, in order, none lost, and an end."""

import asyncio

import pytest
import torch

from forebay.v1 import worker_pb2
from services.common.errors import Code, StatusError
from services.worker.engine.encoder import EncodeOutput
from services.worker.engine.request import FinishReason
from services.worker.outbox import News, Pace
from services.worker.vector_outbox import MESSAGE_BYTES, VectorOutbox

PACE = Pace(delta_seconds=0.001, ping_seconds=0.01)


def output(*rows: list[float], first: int = 0, reason: FinishReason | None = None) -> EncodeOutput:
    return EncodeOutput("r", list(range(first, first + len(rows))), torch.tensor(rows), finish_reason=reason)


async def drained(outbox: VectorOutbox) -> list[worker_pb2.Vectors]:
    messages = []
    while (news := await outbox.next()) is not News.ENDED:
        assert isinstance(news, worker_pb2.Vectors)
        messages.append(news)
    return messages


async def test_what_waits_goes_together_as_little_endian_floats() -> None:
    outbox = VectorOutbox(PACE)
    outbox.push(output([1.0, 2.0]))
    outbox.push(output([3.0, 4.0], first=1, reason=FinishReason.STOP))
    (message,) = await drained(outbox)
    assert list(message.indexes) == [0, 1]
    assert message.values == b"\x00\x00\x80?\x00\x00\x00@\x00\x00@@\x00\x00\x80@"


async def test_a_message_is_bounded() -> None:
    outbox = VectorOutbox(PACE)
    dimensions = 1024
    rows = 3 * MESSAGE_BYTES // (4 * dimensions) + 1
    outbox.push(EncodeOutput("r", list(range(rows)), torch.ones(rows, dimensions), finish_reason=FinishReason.STOP))
    messages = await drained(outbox)
    assert [len(message.values) <= MESSAGE_BYTES for message in messages] == [True] * 4
    assert [index for message in messages for index in message.indexes] == list(range(rows))


async def test_silence_is_told_and_vectors_end_it() -> None:
    outbox = VectorOutbox(PACE)
    assert await outbox.next() is News.SILENCE
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.push(output([1.0], reason=FinishReason.STOP))
    while (news := await waiting) is News.SILENCE:
        waiting = asyncio.create_task(outbox.next())
    assert isinstance(news, worker_pb2.Vectors)
    assert await outbox.next() is News.ENDED


async def test_a_failure_drops_what_waits_and_the_first_one_stands() -> None:
    outbox = VectorOutbox(PACE)
    outbox.push(output([1.0]))
    outbox.fail(StatusError(Code.INTERNAL, "first"))
    outbox.fail(StatusError(Code.INTERNAL, "second"))
    outbox.push(output([1.0]))
    with pytest.raises(StatusError, match="first"):
        await outbox.next()


async def test_the_deadline_is_kept_while_nothing_comes() -> None:
    outbox = VectorOutbox(Pace(ping_seconds=60.0))
    with pytest.raises(StatusError) as caught:
        await outbox.next(asyncio.get_running_loop().time() + 0.01)
    assert caught.value.code is Code.DEADLINE_EXCEEDED
