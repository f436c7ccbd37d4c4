"""Which messages of a stream go when, and what a slow reader may pile up."""

import asyncio

import pytest

from services.common.errors import Code, StatusError
from services.worker.engine.request import FinishReason, PositionLogprobs, TokenLogprob, TokenOutput
from services.worker.outbox import News, Outbox, Pace


def output(position: int, *tokens: int, choice: int = 0, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r", choice, position, list(tokens), finish_reason=finish)


async def test_the_first_token_goes_at_once_and_the_rest_are_joined() -> None:
    outbox = Outbox(Pace(delta_seconds=0.02), num_choices=1)
    clock = asyncio.get_running_loop().time
    began = clock()
    outbox.push(output(0, 10))
    ready = asyncio.ensure_future(outbox.next())
    await asyncio.sleep(0)
    assert ready.done(), "the first token waited"
    first = ready.result()
    assert not isinstance(first, News)
    assert [list(delta.token_ids) for delta in first.deltas] == [[10]]
    for position in range(1, 50):
        outbox.push(output(position, position))
    second = await outbox.next()
    assert not isinstance(second, News)
    assert clock() - began >= 0.01, "the next beat but for one that is less than half a beat away"
    [delta] = second.deltas
    assert (delta.first_position, list(delta.token_ids)) == (1, list(range(1, 50)))


async def test_the_last_token_goes_at_once() -> None:
    outbox = Outbox(Pace(delta_seconds=60), num_choices=1)
    outbox.push(output(0, 1))
    await outbox.next()
    outbox.push(output(1, 2))
    outbox.push(output(2, 3, finish=FinishReason.LENGTH))
    message = await asyncio.wait_for(outbox.next(), 1)
    assert not isinstance(message, News)
    [delta] = message.deltas
    assert (list(delta.token_ids), delta.finish_reason) == ([2, 3], 2)
    assert await outbox.next() is News.ENDED


@pytest.mark.parametrize(("num_streams", "seconds"), [(1, 0.02), (8, 0.04), (16, 0.08), (64, 0.1)])
def test_the_more_streams_the_more_tokens_share_a_message(num_streams: int, seconds: float) -> None:
    assert Pace().delta(num_streams) == pytest.approx(seconds)


async def test_a_crowd_delays_what_is_neither_first_nor_last() -> None:
    outbox = Outbox(Pace(delta_seconds=0, share_seconds=60, most_delta_seconds=60), num_choices=1, num_streams=lambda: 1)
    outbox.push(output(0, 1))
    await outbox.next()
    outbox.push(output(1, 2))
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.push(output(2, 3, finish=FinishReason.STOP))
    assert not isinstance(await asyncio.wait_for(waiting, 1), News)


async def test_each_choice_has_a_first_token_that_goes_at_once() -> None:
    outbox = Outbox(Pace(delta_seconds=60), num_choices=2)
    outbox.push(output(0, 1))
    await outbox.next()
    outbox.push(output(1, 2))
    outbox.push(output(0, 7, choice=1))
    message = await asyncio.wait_for(outbox.next(), 1)
    assert not isinstance(message, News)
    assert [(d.choice_index, d.first_position, list(d.token_ids)) for d in message.deltas] == [(0, 1, [2]), (1, 0, [7])]


async def test_silence_is_told() -> None:
    outbox = Outbox(Pace(ping_seconds=0.005), num_choices=1)
    assert [await outbox.next() for _ in range(3)] == [News.SILENCE] * 3


async def test_a_failure_wakes_the_reader_and_drops_what_waits() -> None:
    outbox = Outbox(Pace(delta_seconds=60), num_choices=1)
    reading = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.fail(StatusError(Code.INTERNAL, "first"))
    outbox.fail(StatusError(Code.UNKNOWN, "second"))
    outbox.push(output(0, 1))
    with pytest.raises(StatusError, match="first"):
        await reading


async def test_the_deadline_ends_a_silent_stream() -> None:
    outbox = Outbox(Pace(), num_choices=1)
    with pytest.raises(StatusError) as caught:
        await outbox.next(deadline=asyncio.get_running_loop().time() + 0.005)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


async def test_a_message_has_a_largest_size_and_the_rest_follows_at_once() -> None:
    outbox = Outbox(Pace(delta_seconds=60, message_bytes=1000), num_choices=1)
    top = tuple(TokenLogprob(token, -1.0) for token in range(20))
    for position in range(10):
        outbox.push(TokenOutput("r", 0, position, [position], logprobs=[PositionLogprobs(top[0], top)]))
    positions = []
    while len(positions) < 10:
        message = await asyncio.wait_for(outbox.next(), 1)
        assert not isinstance(message, News)
        assert message.ByteSize() <= 1000
        [delta] = message.deltas
        assert len(delta.logprobs) == len(delta.token_ids)
        positions += delta.token_ids
    assert positions == list(range(10))


async def test_what_piles_up_for_a_slow_reader_is_bounded() -> None:
    outbox = Outbox(Pace(backlog_bytes=2000), num_choices=1)
    for position in range(1000):
        outbox.push(output(position, position))
    with pytest.raises(StatusError) as caught:
        await outbox.next()
    assert caught.value.code is Code.RESOURCE_EXHAUSTED


async def test_prompt_logprobs_may_wait_for_the_pace() -> None:
    outbox = Outbox(Pace(delta_seconds=0.01), num_choices=1)
    chosen = PositionLogprobs(TokenLogprob(3, 0.0), has_logprob=False)
    outbox.push(TokenOutput("r", 0, 0, prompt_logprobs=[chosen]))
    message = await outbox.next()
    assert not isinstance(message, News)
    assert message.deltas[0].prompt_logprobs[0].chosen.token_id == 3
    assert not message.deltas[0].prompt_logprobs[0].has_logprob
