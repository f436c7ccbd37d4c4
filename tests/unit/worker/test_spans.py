"""What a worker's spans say of requests and steps."""

import pytest
from opentelemetry.trace import StatusCode

from services.common import semconv, tracing
from services.worker.engine.timeline import Event, Kind, Snapshot
from services.worker.metrics import Ended
from services.worker.spans import MAX_LINKS, STEP_SECONDS, StepSpans, trace_request
from services.worker.turn import Step
from tests.spans import recorded

TIMELINE = Snapshot(2.0, (Event(Kind.ADMITTED, 2.0, 0, 0, 8), Event(Kind.PREFILL, 3.0, 0, 24, 0, 1), Event(Kind.ENDED, 6.0, 1, 5)), ())


def end(reason: str = "stop", **moments: float | None) -> Ended:
    known: dict[str, float | None] = {"started_at": 2.0, "first_token_at": 3.0, "last_token_at": 5.5, **moments}
    return Ended(reason, 1.0, 6.0, 1, 32, 5, 5, num_cached_tokens=8, num_preemptions=2, **known)  # type: ignore[arg-type]  # by name


def test_a_request_is_prefill_and_decode_with_its_timelines_events() -> None:
    with recorded() as spans:
        trace_request(tracing.start("Generate"), end(), TIMELINE)
    prefill, decode, request = spans.ended
    for span, name, seconds in ((prefill, "prefill", 1.0), (decode, "decode", 2.5)):
        assert (span.name, (span.end_time - span.start_time) / 1e9) == (name, pytest.approx(seconds, abs=0.1))
    assert {span.parent.span_id for span in (prefill, decode)} == {request.context.span_id}
    assert request.attributes[semconv.FOREBAY_NUM_PREEMPTIONS] == 2
    assert request.attributes[semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 8
    assert [(event.name, dict(event.attributes)) for event in request.events] == [
        ("admitted", {semconv.FOREBAY_CHOICE: 0, semconv.FOREBAY_NUM_CACHED_TOKENS: 8}),
        ("prefill", {semconv.FOREBAY_CHOICE: 0, semconv.FOREBAY_NUM_TOKENS: 24}),
        ("ended", {semconv.FOREBAY_CHOICE: 1, semconv.FOREBAY_NUM_TOKENS: 5}),
    ]
    assert request.status.status_code is StatusCode.UNSET


def test_a_request_that_was_left_while_it_waited_has_no_parts_and_says_so() -> None:
    with recorded() as spans:
        trace_request(tracing.start("Generate"), end("abort", started_at=None, first_token_at=None, last_token_at=None), None)
    (request,) = spans.ended
    assert (request.name, request.status.status_code, request.attributes[semconv.ERROR_TYPE]) == ("llm_request", StatusCode.ERROR, "abort")


def test_a_call_without_a_trace_has_no_spans() -> None:
    with recorded() as spans:
        trace_request(tracing.OFF, end(), TIMELINE)
    assert not spans.num_started


def test_one_step_a_second_is_linked_to_its_requests() -> None:
    with recorded() as spans:
        members = [tracing.start(f"Generate {number}") for number in range(MAX_LINKS + 8)]
        steps = StepSpans()
        for ended in (10.0, 10.0 + STEP_SECONDS / 2, 10.0 + STEP_SECONDS, 10.1 + STEP_SECONDS):
            steps.observe([Step("toy", ended - 0.02, ended - 0.01, 1, 1), Step("toy", ended - 0.01, ended, 70, 40)], members)
        steps.observe([Step("toy", 20.0, 21.0, 1, 1)], [])  # nobody who is traced took part
        steps.observe([], members)
    seen = spans.named(semconv.SPAN_ENGINE_STEP)
    assert len(seen) == 2
    assert [span.parent for span in seen] == [None, None]
    assert [link.context.span_id for link in seen[0].links] == [int(span.ids[1], 16) for span in members[:MAX_LINKS]]
    assert seen[0].attributes[semconv.FOREBAY_NUM_STEP_TOKENS] == 70
