"""A request's parts are disjoint and whole, whatever became of it; what worker and scheduler say goes with them, and no prompt does."""

import time
from dataclasses import replace
from typing import Any

import pytest

from forebay.v1 import explain_pb2, inference_pb2, scheduler_pb2
from services.common.errors import Code, StatusError, unavailable
from services.gateway.course import Course
from tests.fakes import WorkerCall, play, stall
from tests.unit.gateway.build import generation, letters, make_token, stack
from tests.unit.gateway.test_client import fleet, run

Phase = explain_pb2.Phase
END = scheduler_pb2.FinishRequest(request_id="r")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _lease(epoch: int = 1) -> scheduler_pb2.Lease:
    decision = explain_pb2.Decision(num_candidates=1, candidates=[explain_pb2.Candidate(worker_id="w1", chosen=True)])
    return scheduler_pb2.Lease(epoch=epoch, worker_id=f"w{epoch}", decision=decision)


def _parts(attempt: explain_pb2.Attempt) -> dict[str, float]:
    return {Phase.Name(part.phase).removeprefix("PHASE_").lower(): pytest.approx(part.seconds) for part in attempt.parts}


def _sum(record: explain_pb2.Explanation) -> float:
    return record.admit_seconds + sum(part.seconds for attempt in record.attempts for part in attempt.parts)


def _told(waiting: float = 0.0, prefill: float = 0.0, decode: float = 0.0, preempted: float = 0.0) -> explain_pb2.Timeline:
    return explain_pb2.Timeline(waiting_seconds=waiting, prefill_seconds=prefill, decode_seconds=decode, preempted_seconds=preempted)


def _placed(clock: Clock) -> Course:
    """Half a second in the gateway, two in the queue, a quarter to the worker."""
    course = Course(replace(generation(), received_at=clock.now - 0.5), clock)
    course.asked()
    course.queued(3)
    course.queued(1)
    clock.now += 2
    course.leased(_lease())
    clock.now += 0.25
    course.accepted()
    return course


def test_a_request_that_went_well() -> None:
    clock = Clock()
    course = _placed(clock)
    clock.now += 5
    course.completed(_told(1, 1, 2, 0.5))
    course.done()
    clock.now += 1
    record = course.explanation(END)
    assert record.total_seconds == pytest.approx(_sum(record)) == pytest.approx(8.75)
    (attempt,) = record.attempts
    assert _parts(attempt) == {
        "queue": 2, "dispatch": 0.25, "waiting": 1, "prefill": 1, "decode": 2, "preempted": 0.5, "delivery": 1.5,
    }  # fmt: skip
    assert (attempt.position, attempt.worker_id, attempt.decision.num_candidates) == (3, "w1", 1)


def test_a_call_that_is_left_is_told_by_what_was_seen_of_it() -> None:
    clock = Clock()
    course = _placed(clock)
    clock.now += 1
    course.goes_on(_told(0.25, 0.5))
    clock.now += 3
    course.waits()
    clock.now += 2
    record = course.explanation(END)
    assert _parts(record.attempts[0]) == {
        "queue": 2, "dispatch": 0.25, "waiting": 0.25, "prefill": 0.5, "decode": 3, "preempted": 2, "delivery": 0.25,
    }  # fmt: skip
    assert record.total_seconds == pytest.approx(_sum(record))


@pytest.mark.parametrize(("waits", "phase"), [(True, "waiting"), (False, "prefill")])
def test_a_worker_that_said_nothing_of_it(waits: bool, phase: str) -> None:
    clock = Clock()
    course = _placed(clock)
    if waits:
        course.waits()
    clock.now += 3
    record = course.explanation(END)
    assert _parts(record.attempts[0]) == {"queue": 2, "dispatch": 0.25, phase: 3}


def test_a_move_is_told_as_such_and_both_attempts_are() -> None:
    clock = Clock()
    course = _placed(clock)
    clock.now += 1
    course.done("unreachable")
    clock.now += 0.5  # a pause before it is placed again
    course.asked()
    clock.now += 1
    course.leased(_lease(2))
    course.accepted()
    clock.now += 2
    course.completed(_told(decode=2))
    course.done()
    record = course.explanation(END)
    first, second = record.attempts
    assert (first.lost, first.epoch, second.lost, second.epoch) == ("unreachable", 1, "", 2)
    assert _parts(second) == {"moving": 1.5, "decode": 2}
    assert record.total_seconds == pytest.approx(_sum(record)) == pytest.approx(7.25)


def test_a_worker_whose_clock_runs_fast_takes_no_more_than_there_was() -> None:
    clock = Clock()
    course = _placed(clock)
    clock.now += 1
    course.completed(_told(decode=10))
    course.done()
    record = course.explanation(END)
    assert _parts(record.attempts[0]) == {"queue": 2, "decode": 1.25}
    assert record.total_seconds == pytest.approx(_sum(record))


async def test_what_is_over_in_the_queue_is_told_too() -> None:
    async with fleet(play([1])) as (mesh, scheduler, _):
        scheduler.gate.clear()
        with pytest.raises(StatusError) as caught:
            await run(mesh, deadline_seconds=0.2)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        (finish,) = await scheduler.finishes.until_length(1)
    (attempt,) = finish.explanation.attempts
    assert (attempt.epoch, list(_parts(attempt))) == (0, ["queue"])
    assert finish.explanation.status_code == Code.DEADLINE_EXCEEDED.value[0]


async def test_what_no_queue_took_up_is_not_told() -> None:
    async with fleet(play([1])) as (mesh, scheduler, _):
        scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "over the quota", reason="QUOTA"))
        with pytest.raises(StatusError):
            await run(mesh)
        scheduler.refusals.append(unavailable("put out", 20.0, "SHED"))
        with pytest.raises(StatusError):
            await run(mesh)
        (finish,) = await scheduler.finishes.until_length(1)
    assert finish.explanation.status_code == Code.UNAVAILABLE.value[0], "the one that was shed had a ticket"


async def test_a_lost_worker_is_told_in_the_one_record() -> None:
    async def dies(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([1])
        await call.context.abort(Code.UNAVAILABLE, "gone")

    async with fleet(dies, play([1, 2, 3])) as (mesh, scheduler, _):
        _, _ = await run(mesh)
        (finish,) = await scheduler.finishes.until_length(1)
    assert [attempt.lost for attempt in finish.explanation.attempts] == ["unreachable", ""]
    assert finish.explanation.total_seconds == pytest.approx(_sum(finish.explanation))


SECRET = "an elephant in the pantry"


@pytest.mark.parametrize("face", ["http", "stream", "grpc"])
async def test_the_parts_are_the_latency_that_the_client_measures(face: str) -> None:
    async with stack(play(letters("yes"))) as mesh:
        began = time.monotonic()
        if face == "grpc":
            call = mesh.inference.Generate(inference_pb2.GenerateRequest(text=SECRET), metadata=[("authorization", make_token())])
            events = [event async for event in call]
            answered = events[0].started.request_id
        else:
            answer = await mesh.http.post("/v1/completions", json={"prompt": SECRET, "stream": face == "stream"})
            answered = answer.headers["x-forebay-request-id"]
        measured = time.monotonic() - began
        (finish,) = await mesh.scheduler.finishes.until_length(1)
    record = finish.explanation
    assert record.request_id == finish.request_id == answered
    assert record.total_seconds == pytest.approx(_sum(record))
    assert 0 < record.admit_seconds < record.total_seconds <= measured
    assert record.ttft_seconds <= record.total_seconds
    assert SECRET.encode() not in finish.SerializeToString()


async def test_a_client_that_leaves_is_told() -> None:
    async with stack(stall(letters("a"))) as mesh:
        call: Any = mesh.inference.Generate(inference_pb2.GenerateRequest(text="b"), metadata=[("authorization", make_token())])
        await call.read()
        call.cancel()
        (finish,) = await mesh.scheduler.finishes.until_length(1)
    assert finish.explanation.status_code == Code.CANCELLED.value[0]
    assert finish.explanation.total_seconds == pytest.approx(_sum(finish.explanation))
