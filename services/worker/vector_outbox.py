"""One stream's vectors: which go when. Knows no engine thread and no RPC context. Nothing is dropped: a call's vectors are bounded."""

from forebay.v1 import worker_pb2
from services.worker.engine.encoder import EncodeOutput
from services.worker.outbox import Pace, Stream

MESSAGE_BYTES = 1 << 20
"""About the largest message, and the largest of all where one step brings more."""


class VectorOutbox(Stream[tuple[int, bytes], worker_pb2.Vectors]):
    """A request's vectors. What waits is inputs' indexes, each with its vector."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace)
        self._is_last = False

    def push(self, output: EncodeOutput) -> None:
        """New vectors."""
        if self._error is not None:
            return
        rows = output.vectors.numpy().astype("<f4")
        self._pending.extend((index, row.tobytes()) for index, row in zip(output.indexes, rows, strict=True))
        self._is_last |= output.finish_reason is not None
        self._wake.set()

    @property
    def _has_all(self) -> bool:
        return self._is_last

    def _due(self) -> float:
        if self._is_last:
            return self._sent_at
        return self._sent_at + (self._pace.delta_seconds if self._pending else self._pace.ping_seconds)

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
