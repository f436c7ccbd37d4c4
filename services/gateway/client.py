"""One generation's way through the mesh: a lease, Generate on the worker it names, Finish.

Owns failover without lost or doubled tokens, and the end of the lease. Knows tokens, not text.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from forebay.v1 import scheduler_pb2, types_pb2, worker_pb2
from services.common import log, tracing
from services.common.errors import Code, StatusError, unavailable
from services.common.tracing import Span
from services.gateway.attempt import WorkerLost, engine_error, judge, next_message, outcome
from services.gateway.course import Course
from services.gateway.deaths import Deaths
from services.gateway.mesh import Mesh
from services.gateway.placing import Deadline, Placement
from services.gateway.request import Generation, lowered
from services.gateway.wire import cache_salt, engine_sampling
from services.gateway.worker_stream import WorkerStream

_log = log.get(__name__)

_WHERE = "while generating"  # a deadline may pass
_NO_DRAFT, _ACCEPTED = 0, 2  # verdicts, as worker.proto says


@dataclass
class ChoiceProgress:
    """What the client has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    verdicts: bytearray = field(default_factory=bytearray)  # one per token: see worker.proto
    finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED


MeshEvent = worker_pb2.Accepted | worker_pb2.TokenDelta
"""Accepted first and once, then deltas without gaps or repeats, whatever happened to workers meanwhile."""


class MeshCall:
    """One generation in flight. Leaving its context ends the worker's call and the lease, however it is left."""

    def __init__(
        self,
        mesh: Mesh,
        generation: Generation,
        on_lease: Callable[[scheduler_pb2.Lease], None] = lambda _: None,
        span: Span = tracing.OFF,
    ) -> None:
        """`on_lease` hears of each lease before anything is asked of its worker. What this calls is traced below `span`."""
        self.choices = [ChoiceProgress() for _ in range(generation.sampling.n)]
        self.cached_tokens = 0
        self.preemptions = 0
        self.first_token_seconds = 0.0
        mesh.budget.earn()
        self.num_overrun_tokens = 0  # received behind the end of a choice
        self.num_replacements = 0
        self.num_migrations = 0  # replacements with tokens delivered
        self._mesh = mesh
        self._generation = generation
        self._on_lease = on_lease
        self._start = mesh.clock()
        self._deadline = Deadline(generation.deadline_seconds, mesh.clock)
        self._course = Course(generation, mesh.clock)
        self._placement = Placement(mesh, generation, self._deadline, self._course.queued, span)
        self._span = span
        self._deaths = Deaths()
        self._accepted = False  # by any worker
        self._running = False  # accepted by the present one
        self._cut = False  # whether the gateway ended a choice: then what the worker still computes is of no use
        self._num_prompt_logprobs = 0  # passed on
        self._num_prompt_logprobs_seen = 0  # from the present worker
        self._open: WorkerStream | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open is not None:
            self._open.cancel()
        ends = [self._finish_request(error, epoch) for epoch in self._placement.epochs or ([0] if self._is_worth_telling(error) else [])]
        for end in ends[:1]:
            end.explanation.CopyFrom(self._course.explanation(end, self._span.traceparent))
        for end in ends:
            tracing.inside(self._span, partial(self._mesh.finish, end))

    @property
    def request(self) -> Generation:
        """As it runs: a lease may have lowered its class."""
        return self._generation

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished for choice in self.choices)

    @property
    def _most_tokens(self) -> int:
        """Of one choice."""
        return max(len(choice.token_ids) for choice in self.choices)

    def usage(self) -> types_pb2.Usage:
        """What was delivered so far."""
        return types_pb2.Usage(
            prompt_tokens=len(self._generation.prompt_token_ids),
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            drafted_tokens=sum(len(choice.verdicts) - choice.verdicts.count(_NO_DRAFT) for choice in self.choices),
            accepted_tokens=sum(choice.verdicts.count(_ACCEPTED) for choice in self.choices),
        )

    def end_choice(self, index: int, num_tokens: int, reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_STOP) -> None:
        """The gateway ends a choice behind its first `num_tokens` tokens; later ones are neither passed on nor counted."""
        choice = self.choices[index]
        self.num_overrun_tokens += len(choice.token_ids) - num_tokens
        del choice.token_ids[num_tokens:], choice.verdicts[num_tokens:]
        choice.finish_reason = reason
        self._cut = True

    async def events(self) -> AsyncGenerator[MeshEvent]:
        """Runs the request until every choice has ended.

        Raises StatusError: DEADLINE_EXCEEDED, UNAVAILABLE (no worker, or too many were lost), or the worker's own refusal.
        """
        refusals = 0
        for attempt in range(1, self._mesh.limits.max_attempts + 1):
            self._course.asked()
            lease = await self._placement.lease(sum(len(choice.token_ids) for choice in self.choices), self._deaths.awaited)
            self._course.leased(lease)
            self._generation = lowered(self._generation, lease)
            self._on_lease(lease)
            try:
                async with aclosing(self._attempt(lease)) as events:
                    async for event in events:
                        yield event
                return
            except WorkerLost as lost:
                self._course.done("" if self.finished else "unreachable" if lost.unreachable else "refused")
                _log.info("worker_lost", request_id=lease.request_id, worker=lease.worker_id, epoch=lease.epoch, why=str(lost))
                if self.finished:
                    return
                if attempt == self._mesh.limits.max_attempts or not self._mesh.budget.spend():
                    raise unavailable(f"the request lost its worker {attempt} times ({lost}): try again", reason="WORKER_LOST") from lost
                self.num_replacements += 1
                self.num_migrations += any(choice.token_ids for choice in self.choices)
                if self._running and lost.unreachable:
                    self._deaths.lost(lease, self._most_tokens, lost.reason)
                if lost.unreachable:
                    self._mesh.exclude(lease.worker_id)
                else:
                    await self._deadline.pause(self._mesh.backoff(refusals))
                    refusals += 1

    # -- run

    async def _attempt(self, lease: scheduler_pb2.Lease) -> AsyncGenerator[MeshEvent]:
        with self._mesh.worker(lease.address) as worker:
            seconds = self._deadline.seconds_left("before the first token")
            run = partial(worker.generate, self._worker_request(lease), seconds, self._mesh.clock())
            self._open = tracing.inside(self._span, run)
            try:
                while (message := await self._next(lease)) is not None:
                    for event in self._news(message):
                        yield event
                    if message.HasField("completed"):
                        self._mesh.let_end(self._open)
                        self._open = None
                        break
                    if self.finished and self._cut:
                        break
                if not self.finished:
                    raise WorkerLost("the worker ended the stream early", unreachable=False)
            finally:
                self._course.done()
                if self._open is not None:
                    self._open.cancel()

    def _news(self, message: worker_pb2.WorkerServiceGenerateResponse) -> Iterator[MeshEvent]:
        match message.WhichOneof("event"):
            case "accepted":
                self._running = True
                self._course.accepted()
                if not self._accepted:
                    self._accepted = True
                    yield message.accepted
            case "deltas":
                self.cached_tokens = max(self.cached_tokens, message.deltas.num_cached_tokens)
                self._course.goes_on(message.deltas.timeline if message.deltas.HasField("timeline") else None)
                yield from self._fresh_deltas(message.deltas.deltas)
            case "ping" if message.ping.waiting:
                self._course.waits()
            case "completed":
                self._course.completed(message.completed.timeline if message.completed.HasField("timeline") else None)
                self.cached_tokens = max(self.cached_tokens, message.completed.usage.cached_tokens)
                self.preemptions += message.completed.usage.preemptions

    async def _next(self, lease: scheduler_pb2.Lease) -> worker_pb2.WorkerServiceGenerateResponse | None:
        """The worker's next message, None at the end of its stream."""
        assert self._open is not None
        try:
            event = await next_message(self._open.read(self._mesh.limits.worker_silence), lease, self._deadline, _WHERE)
        except StatusError as error:
            raise judge(error, lease, self._deadline, _WHERE, running=self._running) from None
        return event if isinstance(event, worker_pb2.WorkerServiceGenerateResponse) else None

    def _fresh_deltas(self, deltas: Sequence[worker_pb2.TokenDelta]) -> Iterator[worker_pb2.TokenDelta]:
        """The part of the news that the client hasn't got; remembers it as delivered."""
        for delta in deltas:
            choice = self.choices[delta.choice_index]
            if choice.finished:
                self.num_overrun_tokens += len(delta.token_ids)
                continue
            self._drop_known(delta, choice)
            if delta.finish_reason == types_pb2.FINISH_REASON_ERROR:
                raise engine_error(f"choice {delta.choice_index} ended with an error", "")
            if delta.finish_reason == types_pb2.FINISH_REASON_DEADLINE:
                raise self._deadline.error(_WHERE)
            if delta.finish_reason == types_pb2.FINISH_REASON_CANCELLED:
                raise WorkerLost("the worker gave the request up", unreachable=False)
            choice.token_ids.extend(delta.token_ids)
            choice.verdicts.extend(delta.verdicts[: len(delta.token_ids)].ljust(len(delta.token_ids), bytes([_NO_DRAFT])))
            choice.finish_reason = delta.finish_reason
            if delta.token_ids and not self.first_token_seconds:
                self.first_token_seconds = self._mesh.clock() - self._start
            if delta.token_ids or delta.prompt_logprobs or delta.finish_reason:
                yield delta

    def _drop_known(self, delta: worker_pb2.TokenDelta, choice: ChoiceProgress) -> None:
        """Cuts what came before a failover off a delta."""
        if delta.token_ids:
            num_known = len(choice.token_ids) - delta.first_position
            if num_known < 0:
                raise WorkerLost(f"the worker skipped {-num_known} tokens", unreachable=False)
            if num_known > 0:
                del delta.token_ids[:num_known]
                del delta.logprobs[:num_known]
                delta.verdicts = delta.verdicts[num_known:]
                delta.first_position += num_known
        if delta.prompt_logprobs:
            # A new worker repeats the prompt's log-probabilities from the start.
            start = self._num_prompt_logprobs_seen
            self._num_prompt_logprobs_seen += len(delta.prompt_logprobs)
            del delta.prompt_logprobs[: max(0, self._num_prompt_logprobs - start)]
            self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._num_prompt_logprobs_seen)

    # -- the rest

    def _worker_request(self, lease: scheduler_pb2.Lease) -> worker_pb2.WorkerServiceGenerateRequest:
        generation = self._generation
        self._running = False
        self._num_prompt_logprobs_seen = 0
        return worker_pb2.WorkerServiceGenerateRequest(
            request_id=generation.request_id,
            epoch=lease.epoch,
            incarnation=lease.incarnation,
            org=generation.org,
            model=generation.model.full_name,
            model_version=generation.model.version,
            latency_class=generation.latency_class,
            cache_salt=cache_salt(generation.org),
            prompt_token_ids=generation.prompt_token_ids,
            sampling=engine_sampling(generation.sampling),
            delivered=[types_pb2.TokenIds(ids=choice.token_ids) for choice in self.choices] if self._accepted else [],
            finished_choices=[index for index, choice in enumerate(self.choices) if choice.finished],
            ttft_target_seconds=lease.ttft_target_seconds,
            tpot_target_seconds=lease.tpot_target_seconds,
            waited_seconds=self._mesh.clock() - self._start,
            suspect=self._deaths.suspect,
        )

    def _is_worth_telling(self, error: BaseException | None) -> bool:
        """Whether there was a ticket though there is no lease: of a request that no queue took up there is nothing to explain."""
        late_or_shed = isinstance(error, StatusError) and (error.code is Code.DEADLINE_EXCEEDED or error.reason == "SHED")
        return self._course.was_queued or late_or_shed

    def _finish_request(self, error: BaseException | None, epoch: int) -> scheduler_pb2.FinishRequest:
        if isinstance(error, asyncio.CancelledError) and self._generation.siblings.failure is not None:
            error = self._generation.siblings.failure
        code, reason = outcome(error, self.choices[0].finish_reason)
        return scheduler_pb2.FinishRequest(
            request_id=self._generation.request_id,
            epoch=epoch,
            usage=self.usage() if self._accepted else types_pb2.Usage(),  # of what no worker took up, nothing was used
            finish_reason=reason,
            status_code=code,
            ttft_seconds=self.first_token_seconds,
            total_seconds=self._mesh.clock() - self._start,
        )
