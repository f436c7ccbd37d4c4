"""One stream's messages: which go when, and how much may wait for a slow reader. Knows no engine thread and no RPC context."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from forebay.v1 import worker_pb2
from services.common.errors import Code, StatusError
from services.worker.engine.request import TokenOutput
from services.worker.wire import append, size

Item = TypeVar("Item")
Message = TypeVar("Message")


class News(Enum):
    """What a stream says besides tokens."""

    SILENCE = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Pace:
    """Seconds and bytes of a stream."""

    delta_seconds: float = 0.02
    """Tokens wait about this long, so that a fast model doesn't send a message per token; messages go at multiples of it, those of all
    streams together, so that they disturb a CPU's engine once;"""
    share_seconds: float = 0.005
    """or this long for each stream that the worker has: every message costs gateway and worker time that a CPU's engine wants, too;"""
    most_delta_seconds: float = 0.1
    """but at most about this long."""
    ping_seconds: float = 1.0
    """Longest silence."""
    write_seconds: float = 30.0
    """A reader that doesn't take a message for this long is gone."""
    message_bytes: int = 256 << 10
    """About the largest message."""
    backlog_bytes: int = 8 << 20
    """What may pile up for a slow reader."""

    def delta(self, num_streams: int) -> float:
        """How long tokens wait beside so many streams."""
        return max(self.delta_seconds, min(self.share_seconds * num_streams, self.most_delta_seconds))


class Stream(ABC, Generic[Item, Message]):
    """Hands out its next message when that is due, until it ends or fails."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._wake = asyncio.Event()
        self._pending: deque[Item] = deque()
        self._error: StatusError | None = None

    def fail(self, error: StatusError) -> None:
        """The stream ends with this error; what waits is dropped. The first error stands."""
        if self._error is None:
            self._error = error
            self._pending.clear()
            self._wake.set()

    async def next(self, deadline: float | None = None) -> Message | News:
        """The next message when it is due; SILENCE after a second without; ENDED when all has come and was sent.

        Raises the StatusError that the stream failed with, or DEADLINE_EXCEEDED at `deadline` (by the event loop's clock).
        """
        while True:
            if self._error is not None:
                raise self._error
            now = self._loop.time()
            if deadline is not None and now >= deadline:
                raise StatusError(Code.DEADLINE_EXCEEDED, "the deadline passed while the request ran")
            if not self._pending and self._has_all:
                return News.ENDED
            due = self._due()
            if now >= due:
                self._sent_at = now
                return self._take() if self._pending else News.SILENCE
            await self._sleep(due if deadline is None else min(due, deadline))

    async def _sleep(self, until: float) -> None:
        self._wake.clear()
        timer = self._loop.call_at(until, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    @property
    @abstractmethod
    def _has_all(self) -> bool:
        """Nothing comes any more."""

    @abstractmethod
    def _due(self) -> float:
        """When the next message must go."""

    @abstractmethod
    def _take(self) -> Message:
        """As much as fits into one message."""


class Outbox(Stream[tuple[TokenOutput, int], worker_pb2.TokenDeltas]):
    """A request's tokens. What waits is the outputs, each with its bytes."""

    def __init__(self, pace: Pace, *, num_choices: int, num_streams: Callable[[], int] = lambda: 1) -> None:
        """`num_choices`: how many will end. `num_streams`: how many streams there are just now."""
        super().__init__(pace)
        self._num_streams = num_streams
        self._pending_bytes = 0
        self._urgent = False
        self._begun: set[int] = set()
        self._num_open = num_choices

    def push(self, output: TokenOutput) -> None:
        """New tokens of one choice."""
        if self._error is not None:
            return
        if output.finish_reason is not None:
            self._num_open -= 1
        num_bytes = size(output)
        self._pending_bytes += num_bytes
        if self._pending_bytes > self._pace.backlog_bytes:
            self.fail(StatusError(Code.RESOURCE_EXHAUSTED, f"the reader is too slow: {self._pending_bytes} bytes wait for it"))
            return
        if not self._pending:
            self._wake.set()
        self._pending.append((output, num_bytes))
        if (output.token_ids and output.choice_index not in self._begun) or self._num_open == 0:  # a first or the last word
            self._begun.add(output.choice_index)
            self._urgent = True
            self._wake.set()

    @property
    def error(self) -> StatusError | None:
        """How the stream failed, if it did."""
        return self._error

    @property
    def _has_all(self) -> bool:
        return self._num_open == 0

    def _due(self) -> float:
        """When the next message must go."""
        if self._urgent:
            return self._sent_at
        if not self._pending:
            return self._sent_at + self._pace.ping_seconds
        due, beat = self._sent_at + self._pace.delta(self._num_streams()), self._pace.delta_seconds
        return beat * round(due / beat) if beat else due

    def _take(self) -> worker_pb2.TokenDeltas:
        """As much as fits into one message, joined by choice. The rest stays urgent."""
        message = worker_pb2.TokenDeltas()
        deltas: dict[int, worker_pb2.TokenDelta] = {}
        total = 0
        while self._pending and (total == 0 or total + self._pending[0][1] <= self._pace.message_bytes):
            output, num_bytes = self._pending.popleft()
            total += num_bytes
            delta = deltas.get(output.choice_index)
            if delta is None:
                delta = deltas[output.choice_index] = message.deltas.add(
                    choice_index=output.choice_index, first_position=output.first_position
                )
            append(delta, output)
            message.num_cached_tokens = max(message.num_cached_tokens, output.num_cached_tokens)
        self._pending_bytes -= total
        self._urgent = bool(self._pending)
        return message
