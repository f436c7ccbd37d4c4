"""A worker's spans: one of each request with its prefill and decode, made when it has ended; and now and then one of an engine step."""

import time
from collections.abc import Iterable

from services.common import semconv, tracing
from services.common.tracing import Span
from services.worker.engine.timeline import Event, Snapshot
from services.worker.metrics import Ended
from services.worker.turn import Step

STEP_SECONDS = 1.0
"""At most one step in so long has a span: steps come by the hundred."""
MAX_LINKS = 32


def trace_request(parent: Span, end: Ended, timeline: Snapshot | None) -> None:
    """What became of a request here, below the call that brought it; its timeline's events are the span's."""
    if not parent:
        return
    attributes: dict[str, tracing.Value] = {
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [end.reason],
        semconv.GEN_AI_USAGE_INPUT_TOKENS: end.num_prompt_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: end.num_output_tokens,
        semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: end.num_cached_tokens,
        semconv.FOREBAY_NUM_PREEMPTIONS: end.num_preemptions,
    }
    request = tracing.start(semconv.SPAN_LLM_REQUEST, parent, attributes=attributes, seconds_ago=_ago(end.arrived_at))
    if end.started_at is not None:
        prefill = tracing.start(semconv.SPAN_PREFILL, request, seconds_ago=_ago(end.started_at))
        prefill.end(seconds_ago=_ago(end.first_token_at or end.ended_at))
    if end.first_token_at is not None:
        decode = tracing.start(semconv.SPAN_DECODE, request, seconds_ago=_ago(end.first_token_at))
        decode.end(seconds_ago=_ago(end.last_token_at or end.ended_at))
    for event in timeline.events if timeline is not None else ():
        request.event(event.kind.name.lower(), _told(event), seconds_ago=_ago(event.at))
    request.end("" if end.reason in ("stop", "length") else end.reason, seconds_ago=_ago(end.ended_at))


class StepSpans:
    """Which engine steps have a span: a trace of its own each, linked to the requests that took part."""

    def __init__(self) -> None:
        self._due = 0.0

    def observe(self, steps: Iterable[Step], members: Iterable[Span]) -> None:
        """The steps since the last call, and the spans of the requests that got tokens from them. The last one may have a span."""
        if not tracing.is_on():
            return
        last = max(steps, key=lambda step: step.ended, default=None)
        if last is None or last.ended < self._due:
            return
        links = [span for span in members if span.is_recorded][:MAX_LINKS]
        if not links:
            return
        self._due = last.ended + STEP_SECONDS
        attributes: dict[str, tracing.Value] = {
            semconv.FOREBAY_NUM_STEP_TOKENS: last.num_tokens,
            semconv.FOREBAY_NUM_STEP_GENERATED_TOKENS: last.num_generated_tokens,
        }
        step = tracing.start(semconv.SPAN_ENGINE_STEP, attributes=attributes, links=links, seconds_ago=_ago(last.started))
        step.end(seconds_ago=_ago(last.ended))


def _told(event: Event) -> dict[str, tracing.Value]:
    numbers = {semconv.FOREBAY_NUM_TOKENS: event.num_tokens, semconv.FOREBAY_NUM_CACHED_TOKENS: event.num_cached_tokens}
    return {semconv.FOREBAY_CHOICE: event.choice_index, **{name: number for name, number in numbers.items() if number}}


def _ago(at: float) -> float:
    return time.monotonic() - at
