"""Tracing: off unless asked for, spans where they belong, and no state that a task could leave behind."""

import logging
import subprocess
import sys

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from services.common import semconv, tracing
from services.common.settings import SettingsError
from tests.spans import recorded

REMOTE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_nothing_of_the_sdk_is_loaded_while_it_is_off(service: str) -> None:
    words = f"import sys; from services.common import tracing; import services.{service}.__main__; tracing.setup('x'); "
    # redis and FastAPI load what they use of it by themselves.
    words += "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter'))])"
    ran = subprocess.run([sys.executable, "-c", words], env={"PATH": "/usr/bin"}, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_the_standard_variables_turn_it_on(environment: dict[str, str], wanted: bool) -> None:
    assert tracing.is_wanted(environment) is wanted


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER=zipkin: use otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL=http/json: use grpc"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=words):
        tracing.setup("gateway")
    assert not tracing.is_on()


def test_off_is_one_object_that_takes_everything() -> None:
    span = tracing.start("a", tracing.OFF)
    assert span is tracing.OFF
    assert tracing.remote(REMOTE) is tracing.OFF
    span.set({"a": 1})
    span.event("a")
    span.rename("b")
    span.end("bad")
    assert (span.traceparent, span.ids, span.trace_id, bool(span)) == ("", ("", ""), None, False)


def test_a_span_lies_below_its_parent_with_its_times() -> None:
    with recorded() as spans:
        request = tracing.start("request", tracing.remote(REMOTE), kind="server")
        part = tracing.start("part", request, seconds_ago=2.0, links=[request])
        part.event("news", {"a": 1}, seconds_ago=1.5)
        part.end("UNAVAILABLE", seconds_ago=1.0)
        request.end()
    part_, request_ = spans.ended
    assert (request_.kind, request_.parent.span_id) == (SpanKind.SERVER, 0x00F067AA0BA902B7)
    assert part_.parent.span_id == request_.context.span_id
    assert part_.context.trace_id == request_.context.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736
    assert [link.context.span_id for link in part_.links] == [request_.context.span_id]
    assert (part_.end_time - part_.start_time) / 1e9 == pytest.approx(1.0, abs=0.1)
    assert (part_.status.status_code, part_.attributes[semconv.ERROR_TYPE]) == (StatusCode.ERROR, "UNAVAILABLE")
    assert request_.status.status_code is StatusCode.UNSET


def test_a_second_end_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with recorded() as spans:
        span = tracing.start("a")
        span.end()
        span.end("late")
    assert len(spans.ended) == 1
    assert spans.ended[0].status.status_code is StatusCode.UNSET
    assert not caplog.records


@pytest.mark.parametrize("header", ["", "junk", "00-0-0-01", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "x" * 100_000])
def test_a_traceparent_that_is_none_begins_a_trace(header: str) -> None:
    with recorded():
        assert not tracing.remote(header)


def test_an_unsampled_trace_goes_on_unrecorded() -> None:
    with recorded() as spans:
        span = tracing.start("a", tracing.remote(REMOTE.removesuffix("1") + "0"))
        assert (bool(span), span.is_recorded, span.trace_id) == (True, False, None)
        assert span.traceparent.startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")
        assert span.traceparent.endswith("-00")
        span.end()
    assert not spans.ended


def test_what_a_call_begins_is_below_the_span_and_the_task_keeps_its_own() -> None:
    with recorded():
        span = tracing.start("a")
        assert tracing.inside(span, tracing.current) is span
        assert tracing.current() is tracing.OFF
        assert tracing.inside(tracing.OFF, lambda: 7) == 7
        span.end()


def test_a_collector_that_is_away_is_complained_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test of seldom")
    logger.addFilter(tracing._Seldom())
    for _ in range(100):
        logger.warning("no collector")
    assert len(caplog.records) == 1
