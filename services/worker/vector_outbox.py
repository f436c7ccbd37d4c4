"""One stream's vectors: which go when. Knows no engine thread and no RPC context. Nothing is dropped: a call's vectors are bounded."""

import asyncio
from collections import deque

from forebay.v1 import worker_pb2
from services.common.errors import Code, StatusError
from services.worker.engine.encoder import EncodeOutput
from services.worker.outbox import News, Pace

MESSAGE_BYTES = 1 << 20
"""About the largest message, and the largest of all where one step brings more."""


class VectorOutbox:
    """Collects a request's vectors and hands out its next message when that is due."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._wake = asyncio.Event()
        self._pending: deque[tuple[int, bytes]] = deque()  # an input's index, and its vector
        self._is_last = False
        self._error: StatusError | None = None

    def push(self, output: EncodeOutput) -> None:
        """New vectors."""
        if self._error is not None:
            return
        rows = output.vectors.numpy().astype("<f4")
        self._pending.extend((index, row.tobytes()) for index, row in zip(output.indexes, rows, strict=True))
        self._is_last |= output.finish_reason is not None
        self._wake.set()

    def fail(self, error: StatusError) -> None:
        """The stream ends with this error; what waits is dropped. The first error stands."""
        if self._error is None:
            self._error = error
            self._pending.clear()
            self._wake.set()

    async def next(self, deadline: float | None = None) -> worker_pb2.Vectors | News:
        """The next vectors when they are due; SILENCE after a second without; ENDED when all were sent.

        Raises the StatusError that the stream failed with, or DEADLINE_EXCEEDED at `deadline` (by the event loop's clock).
        """
        while True:
            if self._error is not None:
                raise self._error
            now = self._loop.time()
            if deadline is not None and now >= deadline:
                raise StatusError(Code.DEADLINE_EXCEEDED, "the deadline passed while the request ran")
            if self._is_last and not self._pending:
                return News.ENDED
            due = self._due()
            if now >= due:
                self._sent_at = now
                return self._take() if self._pending else News.SILENCE
            await self._sleep(due if deadline is None else min(due, deadline))

    def _due(self) -> float:
        if self._is_last:
            return self._sent_at
        return self._sent_at + (self._pace.delta_seconds if self._pending else self._pace.ping_seconds)

    async def _sleep(self, until: float) -> None:
        self._wake.clear()
        timer = self._loop.call_at(until, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _take(self) -> worker_pb2.Vectors:
        """As much as fits into one message."""
        indexes: list[int] = []
        values: list[bytes] = []
        num_bytes = 0
        while self._pending and (not indexes or num_bytes + len(self._pending[0][1]) <= MESSAGE_BYTES):
            index, row = self._pending.popleft()
            indexes.append(index)
            values.append(row)
            num_bytes += len(row)
        return worker_pb2.Vectors(indexes=indexes, values=b"".join(values))
