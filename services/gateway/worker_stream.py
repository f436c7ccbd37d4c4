"""One request's news from its worker, in order: by its own call, or by a subscription that carries those of many.

Knows no request's course. What a call's failure means is judged elsewhere.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import grpc

from forebay.v1 import worker_pb2

if TYPE_CHECKING:
    from forebay.v1 import worker_pb2_grpc

MAX_WAITING_BYTES = 256 << 10
"""Of one slow reader's news: its stream is paused then."""
FEW_WAITING_BYTES = 64 << 10
"""And goes on from here."""
PLAIN_SECONDS = 60.0
"""A worker that doesn't know subscriptions isn't asked again for so long."""

News = worker_pb2.WorkerServiceGenerateResponse
Call = grpc.aio.UnaryStreamCall[worker_pb2.WorkerServiceGenerateRequest, News]


class WorkerStream:
    """A Generate call. `read` until it answers grpc.aio.EOF or raises; cancel it, or let it end."""

    def __init__(self, call: Call, on_end: Callable[[], None] = lambda: None) -> None:
        self._call = call
        self._on_end = on_end
        self._news: deque[tuple[Any, int]] = deque()  # messages, and the bytes of those that had to wait; an error or EOF last
        self._num_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last_at = self._loop.time()
        self._silence: asyncio.TimerHandle | None = None
        self._silence_seconds = 0.0
        self._ended = False
        self._room = asyncio.Event()
        self.on_crowd: Callable[[bool], None] = lambda _: None  # told True where too much waits, False where little does
        self._crowded = False
        self._carried = False
        self._pump = asyncio.create_task(self._read_call())

    def put(self, message: News) -> None:
        """The next message."""
        if self._ended:
            return
        self._last_at = self._loop.time()
        num_bytes = message.ByteSize() if self._news else 0  # what is read at once needs no count
        self._news.append((message, num_bytes))
        self._num_bytes += num_bytes
        if not self._crowded and self._num_bytes > MAX_WAITING_BYTES:
            self._crowded = True
            self.on_crowd(True)
        self._wake()

    def carry(self, message: News) -> None:
        """The next message, by the subscription."""
        self._carried = True
        self.put(message)

    def end(self, how: Any) -> None:
        """Nothing comes any more: EOF, or the error that `read` raises behind what has come. The first end stands."""
        if not self._ended:
            self._ended = True
            self._news.append((how, 0))
            self._wake()

    async def read(self, silence_seconds: float) -> News | Any:
        """The next message; grpc.aio.EOF at the end. Raises the call's AioRpcError, TimeoutError after a silence."""
        while not self._news:
            self._watch(silence_seconds)
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item, num_bytes = self._news[0]
        if isinstance(item, BaseException):
            raise item
        if item is grpc.aio.EOF:
            return item
        self._news.popleft()
        if num_bytes:
            self._num_bytes -= num_bytes
            if self._crowded and self._num_bytes <= FEW_WAITING_BYTES:
                self._crowded = False
                self._room.set()
                self.on_crowd(False)
        return item

    def cancel(self) -> None:
        """Ends the call, on the worker too."""
        self._leave()
        self._pump.cancel()
        self._call.cancel()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Told when the call has its status. Nobody reads any more."""
        self._leave()
        self._call.add_done_callback(lambda _: callback(self))

    def _leave(self) -> None:
        self._ended = True
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        self._on_end()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _watch(self, seconds: float) -> None:
        """One timer, which looks when the last news was; set anew for each message it would cost more than the message."""
        self._silence_seconds = seconds
        if self._silence is None:
            self._last_at = self._loop.time()
            self._silence = self._loop.call_at(self._last_at + seconds, self._look)

    def _look(self) -> None:
        self._silence = None
        due = self._last_at + self._silence_seconds
        if self._reader is None:
            return  # whoever reads next begins a new silence
        if self._loop.time() < due:
            self._silence = self._loop.call_at(due, self._look)
        elif not self._reader.done():
            self._reader.set_exception(TimeoutError())

    async def _read_call(self) -> None:
        """What the call itself brings: all, or its status alone."""
        num_read = 0
        try:
            while isinstance(message := await self._call.read(), News):
                num_read += 1
                self.put(message)
                if self._crowded:
                    self._room.clear()
                    await self._room.wait()
            if num_read or not self._carried:
                self.end(grpc.aio.EOF)
        except grpc.aio.AioRpcError as error:
            self.end(error)
        except asyncio.CancelledError:  # the call was cancelled on this side
            self.end(asyncio.CancelledError())


class Subscription:
    """The news of all requests on one worker, in as many messages as there are beats. It lasts until it breaks or is closed."""

    def __init__(self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        self.name = token_hex(16)
        self.unknown = False  # the worker doesn't know what this is
        self._streams: dict[int, WorkerStream] = {}
        self._numbers = itertools.count(1)
        self._taken = 0
        self._paused: set[int] = set()
        self._resumed: set[int] = set()
        self._wake = asyncio.Event()
        self._retired = False
        self._call: Any = stub.Subscribe(self._say(), metadata=(("subscription", self.name),))
        self._task = asyncio.create_task(self._listen(), name="listen to a worker")

    @property
    def is_open(self) -> bool:
        """Whether requests may still come."""
        return not self._task.done()

    def delivery(self) -> worker_pb2.Delivery:
        """A place for a request."""
        return worker_pb2.Delivery(subscription=self.name, stream=next(self._numbers))

    def attach(self, number: int, stream: WorkerStream) -> None:
        """Its news goes there."""
        self._streams[number] = stream
        stream.on_crowd = lambda crowded: self._crowd(number, crowded)

    def detach(self, number: int) -> None:
        """Nobody waits for its news any more."""
        self._streams.pop(number, None)
        self._paused.discard(number)
        self._resumed.discard(number)
        if self._retired and not self._streams:
            self.close()

    def retire(self) -> None:
        """Closes it when the last of its requests has ended."""
        self._retired = True
        if not self._streams:
            self.close()

    def close(self) -> None:
        """Ends it now."""
        self._task.cancel()
        self._call.cancel()

    def _crowd(self, number: int, crowded: bool) -> None:
        here, there = (self._paused, self._resumed) if crowded else (self._resumed, self._paused)
        there.discard(number)
        here.add(number)
        self._wake.set()

    async def _say(self) -> AsyncIterator[worker_pb2.WorkerServiceSubscribeRequest]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            request = worker_pb2.WorkerServiceSubscribeRequest(num_taken=self._taken, paused=self._paused, resumed=self._resumed)
            self._paused.clear()
            self._resumed.clear()
            yield request

    async def _listen(self) -> None:
        error: grpc.aio.AioRpcError | None = None
        try:
            while isinstance(message := await self._call.read(), worker_pb2.WorkerServiceSubscribeResponse):
                self._taken += 1
                self._wake.set()
                for news in message.news:
                    if (stream := self._streams.get(news.stream)) is not None:
                        stream.carry(news.response)
        except grpc.aio.AioRpcError as failure:
            error = failure
        if error is not None and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            self.unknown = True  # it has carried nothing
            return
        # Whatever it broke with is no request's fault: gRPC says INTERNAL where the connection went while something was being sent.
        nothing, words = grpc.aio.Metadata(), error.details() if error else "the worker ended it"
        over = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, f"the subscription broke: {words}")
        for stream in list(self._streams.values()):
            stream.end(over)
