"""One request for vectors on its way through the mesh: a lease, Embed on the worker it names, Finish.

Owns failover: another worker is asked for what is missing alone. Knows token ids and vectors' bytes, no face.
"""

import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc

from forebay.v1 import scheduler_pb2, types_pb2, worker_pb2
from services.common import log, tracing
from services.common.errors import StatusError, unavailable
from services.common.tracing import Span
from services.gateway.attempt import WorkerLost, judge, next_message, outcome, within
from services.gateway.course import Course
from services.gateway.embed_request import Embedding
from services.gateway.mesh import Mesh
from services.gateway.placing import Deadline, Placement
from services.gateway.request import lowered

_log = log.get(__name__)

FLOAT_BYTES = 4
_WHERE = "on the worker"  # a deadline may pass


Vector = tuple[int, bytes]
"""An input's index, and its vector: little-endian float32."""


def numbers(values: bytes) -> tuple[float, ...]:
    """A vector's."""
    return struct.unpack(f"<{len(values) // FLOAT_BYTES}f", values)


EmbedEvent = worker_pb2.Accepted | list[Vector]
"""Accepted first and once, then vectors, each once, whatever happened to workers meanwhile."""


class EmbedCall:
    """One request in flight. Leaving its context ends the worker's call and the lease, however it is left."""

    def __init__(
        self,
        mesh: Mesh,
        embedding: Embedding,
        on_lease: Callable[[scheduler_pb2.Lease], None] = lambda _: None,
        span: Span = tracing.OFF,
    ) -> None:
        """`on_lease` hears of each lease before anything is asked of its worker. What this calls is traced below `span`."""
        mesh.budget.earn()
        self.num_replacements = 0
        self._mesh = mesh
        self._embedding = embedding
        self._on_lease = on_lease
        self._span = span
        self._start = mesh.clock()
        self._deadline = Deadline(embedding.deadline_seconds, mesh.clock)
        self._course = Course(embedding, mesh.clock)
        self._placement = Placement(mesh, embedding, self._deadline, self._course.queued, span)
        self._missing = dict.fromkeys(range(len(embedding.inputs)))  # in order
        self._accepted = False  # by any worker
        self._running = False  # accepted by the present one
        self._open: grpc.aio.UnaryStreamCall[Any, Any] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open is not None:
            self._open.cancel()
        late_or_shed = isinstance(error, StatusError) and (error.code is grpc.StatusCode.DEADLINE_EXCEEDED or error.reason == "SHED")
        is_worth_telling = self._course.was_queued or late_or_shed
        ends = [self._finish_request(error, epoch) for epoch in self._placement.epochs or ([0] if is_worth_telling else [])]
        for end in ends[:1]:
            end.explanation.CopyFrom(self._course.explanation(end, self._span.traceparent))
        for end in ends:
            tracing.inside(self._span, partial(self._mesh.finish, end))

    @property
    def request(self) -> Embedding:
        """As it runs: a lease may have lowered its class."""
        return self._embedding

    @property
    def num_delivered(self) -> int:
        """Inputs whose vectors are here."""
        return len(self._embedding.inputs) - len(self._missing)

    def usage(self) -> types_pb2.Usage:
        """What was delivered so far."""
        inputs = self._embedding.inputs
        return types_pb2.Usage(prompt_tokens=sum(len(ids) for index, ids in enumerate(inputs) if index not in self._missing))

    async def events(self) -> AsyncGenerator[EmbedEvent]:
        """Runs the request until every input has its vector.

        Raises StatusError: DEADLINE_EXCEEDED, UNAVAILABLE (no worker, or too many were lost), or the worker's own refusal.
        """
        refusals = 0
        for attempt in range(1, self._mesh.limits.max_attempts + 1):
            self._course.asked()
            lease = await self._placement.lease(0)
            self._course.leased(lease)
            self._embedding = lowered(self._embedding, lease)
            self._on_lease(lease)
            try:
                async with aclosing(self._attempt(lease)) as events:
                    async for event in events:
                        yield event
                return
            except WorkerLost as lost:
                self._course.done("" if not self._missing else "unreachable" if lost.unreachable else "refused")
                _log.info("worker_lost", request_id=lease.request_id, worker=lease.worker_id, epoch=lease.epoch, why=str(lost))
                if not self._missing:
                    return
                if attempt == self._mesh.limits.max_attempts or not self._mesh.budget.spend():
                    raise unavailable(f"the request lost its worker {attempt} times ({lost}): try again", reason="WORKER_LOST") from lost
                self.num_replacements += 1
                if lost.unreachable:
                    self._mesh.exclude(lease.worker_id)
                else:
                    await self._deadline.pause(self._mesh.backoff(refusals))
                    refusals += 1

    async def _attempt(self, lease: scheduler_pb2.Lease) -> AsyncGenerator[EmbedEvent]:
        asked = list(self._missing)
        self._running = False
        with self._mesh.worker(lease.address) as worker:
            seconds = self._deadline.seconds_left("before the first vector")
            self._open = tracing.inside(self._span, partial(worker.stub.Embed, self._worker_request(lease, asked), timeout=seconds))
            try:
                while (message := await self._next(lease)) is not None:
                    match message.WhichOneof("event"):
                        case "accepted":
                            self._course.accepted()
                            self._running = True
                            if not self._accepted:
                                self._accepted = True
                                yield message.accepted
                        case "vectors":
                            self._course.goes_on(None)
                            yield self._vectors(message.vectors, asked)
                        case "ping" if message.ping.waiting:
                            self._course.waits()
                        case "completed":
                            self._course.completed(message.completed.timeline if message.completed.HasField("timeline") else None)
                            self._mesh.let_end(self._open)
                            self._open = None
                            break
                if self._missing:
                    raise WorkerLost("the worker ended the stream early", unreachable=False)
            finally:
                self._course.done()
                if self._open is not None:
                    self._open.cancel()

    async def _next(self, lease: scheduler_pb2.Lease) -> worker_pb2.WorkerServiceEmbedResponse | None:
        assert self._open is not None
        reading = within(self._mesh.limits.worker_silence, self._open.read())
        try:
            message = await next_message(reading, lease, self._deadline, _WHERE)
        except StatusError as error:
            raise judge(error, lease, self._deadline, _WHERE, running=self._running) from None
        return message if isinstance(message, worker_pb2.WorkerServiceEmbedResponse) else None

    def _vectors(self, news: worker_pb2.Vectors, asked: Sequence[int]) -> list[Vector]:
        """The vectors by the request's own numbers."""
        num_bytes = self._embedding.dimensions * FLOAT_BYTES
        if len(news.values) != num_bytes * len(news.indexes) or not all(0 <= index < len(asked) for index in news.indexes):
            raise WorkerLost(f"the worker sent {len(news.values)} bytes for {len(news.indexes)} vectors", unreachable=False)
        vectors: list[Vector] = []
        for row, index in enumerate(news.indexes):
            if asked[index] in self._missing:
                del self._missing[asked[index]]
                vectors.append((asked[index], news.values[row * num_bytes : (row + 1) * num_bytes]))
        return vectors

    def _worker_request(self, lease: scheduler_pb2.Lease, asked: Sequence[int]) -> worker_pb2.WorkerServiceEmbedRequest:
        embedding = self._embedding
        return worker_pb2.WorkerServiceEmbedRequest(
            request_id=embedding.request_id,
            epoch=lease.epoch,
            incarnation=lease.incarnation,
            org=embedding.org,
            model=embedding.model.full_name,
            model_version=embedding.model.version,
            latency_class=embedding.latency_class,
            inputs=[types_pb2.TokenIds(ids=embedding.inputs[index]) for index in asked],
            dimensions=embedding.dimensions if embedding.dimensions < embedding.model.dimensions else 0,
        )

    def _finish_request(self, error: BaseException | None, epoch: int) -> scheduler_pb2.FinishRequest:
        code, reason = outcome(error, types_pb2.FINISH_REASON_STOP)
        return scheduler_pb2.FinishRequest(
            request_id=self._embedding.request_id,
            epoch=epoch,
            usage=self.usage(),
            finish_reason=reason,
            status_code=code,
            total_seconds=self._mesh.clock() - self._start,
        )
