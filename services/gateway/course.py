"""Where a request's time went: moments by the gateway's clock, and what schedulers and workers said of what lies between.

Knows no stream and no token. Written to a few times per request, read once, at its end.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forebay.v1 import explain_pb2, scheduler_pb2
from services.gateway.request import Admitted, lowered

Phase = explain_pb2.Phase
Seconds = dict[explain_pb2.Phase.ValueType, float]


@dataclass(eq=False)
class _Attempt:
    """One placement. Times by the gateway's clock; 0: not yet."""

    asked_at: float
    position: int | None = None
    lease: scheduler_pb2.Lease | None = None
    leased_at: float = 0.0
    accepted_at: float = 0.0
    timeline: explain_pb2.Timeline | None = None
    told_at: float = 0.0  # when the timeline came
    whole: bool = False  # the timeline goes to the request's end on the worker
    waiting_since: float = 0.0  # since a ping that said so, and no token came
    done_at: float = 0.0  # nothing more was expected of the worker
    lost: str = ""


class Course:
    """One request's."""

    def __init__(self, request: Admitted, clock: Callable[[], float]) -> None:
        """The mesh is going to be asked now."""
        self._request = request
        self._clock = clock
        self._started_at = clock()
        self._admit_seconds = max(0.0, self._started_at - request.received_at) if request.received_at else 0.0
        self._attempts: list[_Attempt] = []

    @property
    def was_queued(self) -> bool:
        """Whether a scheduler said that it has a ticket."""
        return any(attempt.position is not None or attempt.lease is not None for attempt in self._attempts)

    def asked(self) -> None:
        """A placement is asked for; what came before has ended."""
        self._attempts.append(_Attempt(self._attempts[-1].done_at if self._attempts else self._started_at))

    def queued(self, position: int) -> None:
        """So many are before it."""
        attempt = self._attempts[-1]
        attempt.position = position if attempt.position is None else attempt.position

    def leased(self, lease: scheduler_pb2.Lease) -> None:
        """It has a worker."""
        attempt = self._attempts[-1]
        attempt.lease, attempt.leased_at = lease, self._clock()
        self._request = lowered(self._request, lease)

    def accepted(self) -> None:
        """The worker has it."""
        self._attempts[-1].accepted_at = self._clock()

    def waits(self) -> None:
        """The worker says that it has no room for it just now."""
        attempt = self._attempts[-1]
        attempt.waiting_since = attempt.waiting_since or self._clock()

    def goes_on(self, timeline: explain_pb2.Timeline | None) -> None:
        """There are tokens, and perhaps a word on what became of it so far."""
        attempt = self._attempts[-1]
        attempt.waiting_since = 0.0
        if timeline is not None:
            attempt.timeline, attempt.told_at = timeline, self._clock()

    def completed(self, timeline: explain_pb2.Timeline | None) -> None:
        """The worker's last word."""
        attempt = self._attempts[-1]
        if timeline is not None:
            attempt.timeline, attempt.whole = timeline, True

    def done(self, lost: str = "") -> None:
        """Nothing more is expected of the worker; `lost`: but it should be. The first word stands."""
        attempt = self._attempts[-1]
        attempt.done_at = attempt.done_at or self._clock()
        attempt.lost = attempt.lost or lost

    def explanation(self, finish: scheduler_pb2.FinishRequest, traceparent: str = "") -> explain_pb2.Explanation:
        """All of it, now that the request has ended like this."""
        now, request = self._clock(), self._request
        total = self._admit_seconds + now - self._started_at
        return explain_pb2.Explanation(
            request_id=request.request_id,
            org=request.org,
            latency_class=request.latency_class,
            lowered_from=request.lowered_from,
            model=request.model.full_name,
            max_tokens=request.max_tokens,
            n=request.n,
            received_at=time.time() - total,
            total_seconds=total,
            ttft_seconds=finish.ttft_seconds and finish.ttft_seconds + self._admit_seconds,
            finish_reason=finish.finish_reason,
            status_code=finish.status_code,
            usage=finish.usage,
            admit_seconds=self._admit_seconds,
            attempts=self._told(now),
            traceparent=traceparent,
        )

    def _told(self, now: float) -> Iterator[explain_pb2.Attempt]:
        for number, attempt in enumerate(self._attempts):
            end = self._attempts[number + 1].asked_at if number + 1 < len(self._attempts) else now
            seconds = _seconds(attempt, end, Phase.PHASE_MOVING if number else Phase.PHASE_QUEUE)
            told = explain_pb2.Attempt(
                at_seconds=attempt.asked_at - self._started_at + self._admit_seconds,
                parts=[explain_pb2.Part(phase=phase, seconds=spent) for phase, spent in seconds.items() if spent > 0],
                timeline=attempt.timeline,
                position=attempt.position,
                lost=attempt.lost,
            )
            if attempt.lease is not None:
                told.epoch, told.worker_id = attempt.lease.epoch, attempt.lease.worker_id
                if attempt.lease.HasField("decision"):
                    told.decision.CopyFrom(attempt.lease.decision)
            yield told


def _seconds(attempt: _Attempt, end: float, placing: explain_pb2.Phase.ValueType) -> Seconds:
    """An attempt's time by phase, all of it, in the phases' order."""
    if not attempt.leased_at:
        return {placing: end - attempt.asked_at}
    done = attempt.done_at or end
    whole, there = done - attempt.leased_at, _on_worker(attempt, done)
    known = sum(there.values())
    if known > whole:  # two clocks
        there = {phase: spent * whole / known for phase, spent in there.items()}
        known = whole
    dispatch = min((attempt.accepted_at or done) - attempt.leased_at, whole - known)
    seconds = {placing: attempt.leased_at - attempt.asked_at, Phase.PHASE_DISPATCH: dispatch, **there}
    seconds[Phase.PHASE_DELIVERY] = whole - dispatch - known
    rest = Phase.PHASE_MOVING if attempt.lost else Phase.PHASE_DELIVERY
    seconds[rest] = seconds.get(rest, 0.0) + end - done
    return seconds


def _on_worker(attempt: _Attempt, done: float) -> Seconds:
    """As the worker says; what it didn't come to say, as it looked from here."""
    told = attempt.timeline or explain_pb2.Timeline()
    there = {
        Phase.PHASE_WAITING: told.waiting_seconds,
        Phase.PHASE_PREFILL: told.prefill_seconds,
        Phase.PHASE_DECODE: told.decode_seconds,
        Phase.PHASE_PREEMPTED: told.preempted_seconds,
    }
    if attempt.whole or not attempt.accepted_at:
        return there
    since, stopped = attempt.told_at or attempt.accepted_at, attempt.waiting_since or done
    if attempt.timeline is None:
        there[Phase.PHASE_WAITING if attempt.waiting_since else Phase.PHASE_PREFILL] += done - since
    else:
        there[Phase.PHASE_DECODE] += stopped - since
        there[Phase.PHASE_PREEMPTED] += done - stopped
    return there
