"""Subscribe: many requests' news in one message, taken at the gateway's pace, each request as it would be by its own call."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from forebay.v1 import worker_pb2
from services.common.errors import from_rpc
from services.worker.outbox import Pace
from services.worker.subscriptions import MAX_UNTAKEN
from tests.worker_harness import Harness, Response, continuation, hear, serving, until

NAME = "s" * 32
Said = worker_pb2.WorkerServiceSubscribeRequest


class Gateway:
    """The other side of a subscription. It takes what it reads."""

    def __init__(self, worker: Harness, name: str = NAME) -> None:
        self._said: asyncio.Queue[Said] = asyncio.Queue()
        self.call: Any = worker.stub.Subscribe(self._say(), metadata=(("subscription", name),))
        self.heard: dict[int, list[Response]] = defaultdict(list)
        self.num_messages = 0

    async def _say(self) -> AsyncIterator[Said]:
        while True:
            yield await self._said.get()

    def say(self, **fields: Any) -> None:
        """What it has taken, and who is slow."""
        self._said.put_nowait(Said(num_taken=self.num_messages, **fields))

    async def read(self, *, take: bool = True) -> set[int]:
        """The next message: whose news it has."""
        message = await self.call.read()
        assert isinstance(message, worker_pb2.WorkerServiceSubscribeResponse)
        self.num_messages += 1
        for news in message.news:
            self.heard[news.stream].append(news.response)
        if take:
            self.say()
        return {news.stream for news in message.news}

    async def until_completed(self, *streams: int) -> None:
        """Reads until these have ended."""
        while not all(self.heard[stream] and self.heard[stream][-1].HasField("completed") for stream in streams):
            await self.read()

    def tokens(self, stream: int) -> list[int]:
        """What a request got, its positions checked to be gapless."""
        ids: list[int] = []
        for response in self.heard[stream]:
            for delta in response.deltas.deltas:
                assert delta.first_position == len(ids)
                ids += delta.token_ids
        return ids


def place(stream: int) -> worker_pb2.Delivery:
    return worker_pb2.Delivery(subscription=NAME, stream=stream)


async def test_requests_news_goes_together_and_their_calls_bring_their_status_alone() -> None:
    async with serving(pace=Pace(delta_seconds=0.01)) as worker:
        gateway = Gateway(worker)
        assert await gateway.read() == set()
        worker.runner.hold()
        calls = [
            asyncio.create_task(hear(worker.stub.Generate(worker.request(f"r{n}", prompt=[n], max_tokens=40, delivery=place(n)))))
            for n in (1, 2, 3)
        ]
        shared = set[int]()
        while len(shared) < 3:  # accepted
            shared |= await gateway.read()
        worker.runner.release()
        sizes = []
        while not all(gateway.heard[n][-1].HasField("completed") for n in (1, 2, 3)):
            sizes.append(len(await gateway.read()))
        assert max(sizes) == 3
        for n, call in zip((1, 2, 3), calls, strict=True):
            assert (await call).events == []
            assert gateway.tokens(n) == continuation([n], 40)
            assert gateway.heard[n][0].accepted.fingerprint == "toy"
        await worker.idle()


async def test_no_more_is_sent_than_the_gateway_takes() -> None:
    async with serving(pace=Pace(delta_seconds=0.0)) as worker:
        gateway = Gateway(worker)
        await gateway.read()
        call = asyncio.create_task(hear(worker.stub.Generate(worker.request(prompt=[1], max_tokens=100, delivery=place(1)))))
        for _ in range(MAX_UNTAKEN):
            await gateway.read(take=False)
        reading = asyncio.create_task(gateway.read())
        await until(lambda: worker.runner.num_steps >= 100 and not worker.engine.has_work)
        assert not reading.done()
        gateway.say()
        await reading
        await gateway.until_completed(1)
        assert gateway.tokens(1) == continuation([1], 100)
        assert gateway.num_messages < 1 + MAX_UNTAKEN + 10  # what waited was joined
        await call


async def test_a_paused_stream_waits_alone() -> None:
    async with serving(pace=Pace(delta_seconds=0.0)) as worker:
        gateway = Gateway(worker)
        await gateway.read()
        worker.runner.hold()
        calls = [asyncio.create_task(hear(worker.stub.Generate(worker.request(f"r{n}", prompt=[n], delivery=place(n))))) for n in (1, 2)]
        while not (gateway.heard[1] and gateway.heard[2]):
            await gateway.read()
        gateway.say(paused=[1])
        await until(lambda: worker.worker._service._subscriptions._open[NAME]._streams[1].paused)
        worker.runner.release()
        await gateway.until_completed(2)
        assert gateway.tokens(1) == []
        gateway.say(resumed=[1])
        await gateway.until_completed(1)
        assert gateway.tokens(1) == continuation([1], 8)
        await asyncio.gather(*calls)


async def test_a_stream_that_is_paused_for_too_long_is_given_up() -> None:
    async with serving(pace=Pace(delta_seconds=0.0, write_seconds=0.05)) as worker:
        gateway = Gateway(worker)
        await gateway.read()
        worker.runner.hold()
        call = worker.stub.Generate(worker.request(max_tokens=8, delivery=place(1)))
        await gateway.read()
        gateway.say(paused=[1])
        await until(lambda: worker.worker._service._subscriptions._open[NAME]._streams[1].paused)
        worker.runner.release()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc(caught.value).reason == "SLOW_READER"
        await worker.idle()


async def test_a_subscription_that_is_not_here_leaves_the_news_to_the_call() -> None:
    async with serving() as worker:
        assert (await hear(worker.stub.Generate(worker.request(prompt=[1], delivery=place(1))))).tokens() == continuation([1], 8)


async def test_requests_end_with_their_subscription() -> None:
    async with serving(pace=Pace(ping_seconds=0.01)) as worker:
        gateway = Gateway(worker)
        await gateway.read()
        worker.runner.hold()
        call = worker.stub.Generate(worker.request(delivery=place(1)))
        await gateway.read()
        gateway.call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc(caught.value).reason == "SUBSCRIPTION_LOST"
        worker.runner.release()
        await worker.idle()


async def test_cancelling_a_carried_request_frees_its_blocks_and_leaves_the_others() -> None:
    async with serving() as worker:
        gateway = Gateway(worker)
        await gateway.read()
        worker.runner.hold()
        calls = [worker.stub.Generate(worker.request(f"r{n}", prompt=[n], delivery=place(n))) for n in (1, 2)]
        while not (gateway.heard[1] and gateway.heard[2]):
            await gateway.read()
        calls[0].cancel()
        worker.runner.release()
        await gateway.until_completed(2)
        assert gateway.tokens(2) == continuation([2], 8)
        await worker.idle()


@pytest.mark.parametrize("name", ["", "x" * 65])
async def test_a_bad_id_is_refused(name: str) -> None:
    async with serving() as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Gateway(worker, name).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_number_is_used_once() -> None:
    async with serving() as worker:
        gateway = Gateway(worker)
        await gateway.read()
        worker.runner.hold()
        first = worker.stub.Generate(worker.request("a", delivery=place(1)))
        await gateway.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(worker.stub.Generate(worker.request("b", delivery=place(1))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        first.cancel()
        worker.runner.release()
        await worker.idle()
