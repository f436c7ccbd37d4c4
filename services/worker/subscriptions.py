"""Subscriptions: the news of all of a gateway's requests, one message for what there is at a time. Knows no lease and no engine.

A stream has one piece of news on its way at most, so that what it can't send stays in its own outbox, and none keeps another.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from forebay.v1 import worker_pb2
from services.common.errors import Code, StatusError, invalid

METADATA_KEY = "subscription"
MAX_ID_LENGTH = 64
MAX_UNTAKEN = 2
"""Messages on their way: one that is read and one behind it. More would only be old when they are read."""
MESSAGE_BYTES = 1 << 20
"""About the largest message."""

Request = worker_pb2.WorkerServiceSubscribeRequest
Response = worker_pb2.WorkerServiceSubscribeResponse
News = worker_pb2.WorkerServiceGenerateResponse
Context = grpc.aio.ServicerContext[Request, Response]


class Subscription:
    """One gateway's. Ends with its call; who writes then is told UNAVAILABLE."""

    def __init__(self) -> None:
        self._streams: dict[int, Carried] = {}
        self._pending: deque[worker_pb2.StreamNews] = deque()
        self._num_sent = self._num_taken = 0
        self._wake = asyncio.Event()
        self.closed = False

    @contextmanager
    def stream(self, number: int) -> Iterator["Carried"]:
        """A request's place in it, while it runs. StatusError where the number is taken."""
        if number in self._streams:
            raise invalid("delivery.stream", f"delivery.stream {number} is another request's: use each number once")
        carried = self._streams[number] = Carried(self, number)
        try:
            yield carried
        finally:
            del self._streams[number]

    def put(self, news: worker_pb2.StreamNews) -> None:
        """Goes with the next message."""
        self._pending.append(news)
        self._wake.set()

    async def send(self, context: Context) -> None:
        """For ever: what there is, as long as the gateway takes it."""
        await self._write(context, Response())
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending and self._num_sent - self._num_taken < MAX_UNTAKEN:
                await self._write(context, self._take())

    async def listen(self, requests: AsyncIterator[Request]) -> None:
        """Until the gateway has nothing to say any more."""
        async for request in requests:
            self._num_taken = max(self._num_taken, min(request.num_taken, self._num_sent))
            for number in request.paused:
                if (carried := self._streams.get(number)) is not None:
                    carried.paused = True
            for number in request.resumed:
                if (carried := self._streams.get(number)) is not None:
                    carried.paused = False
                    carried.look()
            self._wake.set()

    def close(self) -> None:
        """Nothing is sent any more."""
        self.closed = True
        self._pending.clear()
        for carried in self._streams.values():
            carried.look()

    async def _write(self, context: Context, message: Response) -> None:
        self._num_sent += 1
        await context.write(message)

    def _take(self) -> Response:
        message, num_bytes = Response(), 0
        while self._pending and num_bytes < MESSAGE_BYTES:
            news = self._pending.popleft()
            num_bytes += news.ByteSize()
            message.news.append(news)
            if (carried := self._streams.get(news.stream)) is not None:
                carried.pending = False
                carried.look()
        return message


class Carried:
    """One request's stream in a subscription."""

    def __init__(self, subscription: Subscription, number: int) -> None:
        self._subscription = subscription
        self._number = number
        self._free = asyncio.Event()
        self.pending = False  # its last news hasn't gone
        self.paused = False

    def look(self) -> None:
        """Something has changed that a writer may wait for."""
        self._free.set()

    async def write(self, response: News) -> None:
        """As a call's write: waits while the reader is slow. StatusError UNAVAILABLE where the subscription is over."""
        await self._until_gone(resumed=True)
        self.pending = True
        self._subscription.put(worker_pb2.StreamNews(stream=self._number, response=response))

    async def flush(self) -> None:
        """Waits until its last news has gone."""
        await self._until_gone(resumed=False)

    async def _until_gone(self, *, resumed: bool) -> None:
        while not self._subscription.closed and (self.pending or (resumed and self.paused)):
            self._free.clear()
            await self._free.wait()
        if self._subscription.closed:
            raise StatusError(Code.UNAVAILABLE, "the subscription that this request's news went by is over", reason="SUBSCRIPTION_LOST")


class Subscriptions:
    """All of a worker's, by the ids that gateways made for them."""

    def __init__(self) -> None:
        self._open: dict[str, Subscription] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    def of(self, delivery: worker_pb2.Delivery) -> Subscription | None:
        """The one that is meant; None where it isn't here, or none is."""
        return self._open.get(delivery.subscription)

    async def serve(self, requests: AsyncIterator[Request], context: Context) -> None:
        """One subscription's life. StatusError: a bad id, or one that is here already."""
        name = next((str(value) for key, value in context.invocation_metadata() or () if key == METADATA_KEY), "")
        if not 0 < len(name) <= MAX_ID_LENGTH or name in self._open:
            raise invalid(METADATA_KEY, f"the metadata's {METADATA_KEY} must be 1 to {MAX_ID_LENGTH} characters that no other has")
        subscription = self._open[name] = Subscription()
        tasks = {asyncio.create_task(subscription.send(context)), asyncio.create_task(subscription.listen(requests))}
        self._calls |= tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._open[name]
            subscription.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._calls -= tasks

    def close(self) -> None:
        """Ends them all: the worker stops."""
        for task in self._calls:
            task.cancel()
