"""Spans by OpenTelemetry: on where its standard OTEL_* variables say so, else nothing of its SDK is loaded and a span is one shared object.

A span is handed along, or is its task's (`current`). Nothing is ever detached, so a stream may be left or closed from any task.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import uuid4

from services.common import semconv
from services.common.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

Kind = Literal["internal", "server", "client"]
Answer = TypeVar("Answer")
Value = str | bool | int | float | list[str] | list[float]
_SHUTDOWN_SECONDS = 2.0
_QUIET_SECONDS = 60.0
_COMPLAINERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")


class Span:
    """A span under way, a remote one, or none at all. What is set on one that nobody records is dropped."""

    __slots__ = ("_ended", "_span")

    def __init__(self, span: "OtelSpan | None" = None) -> None:
        self._span = span
        self._ended = False

    def __bool__(self) -> bool:
        """Whether there is a trace, recorded or not."""
        return self._span is not None

    @property
    def is_recorded(self) -> bool:
        """Whether somebody will see it."""
        return self._span is not None and self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """W3C's header that makes a span elsewhere a child of this; "" without a trace."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def ids(self) -> tuple[str, str]:
        """(trace id, span id) in hex, "" without a trace."""
        _, trace_id, span_id, _ = (self.traceparent or "---").split("-")
        return trace_id, span_id

    @property
    def trace_id(self) -> str | None:
        """In hex, where somebody will see it: what an exemplar leads to."""
        return self.ids[0] if self.is_recorded else None

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Adds attributes."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Its name is known better now."""
        if self._span is not None:
            self._span.update_name(name)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None, *, seconds_ago: float = 0.0) -> None:
        """Something happened."""
        if self._span is not None:
            self._span.add_event(name, attributes, timestamp=_at(seconds_ago))

    def end(self, error: str = "", *, seconds_ago: float = 0.0) -> None:
        """It is over; `error` is the type of what it failed with. A second end changes nothing."""
        if self._span is None or self._ended:
            return
        self._ended = True
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute(semconv.ERROR_TYPE, error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(_at(seconds_ago))


OFF = Span()
_current: ContextVar[Span] = ContextVar("span", default=OFF)
_tracer: "Tracer | None" = None
_provider: "TracerProvider | None" = None


def current() -> Span:
    """The span of this task, or of the one that began it."""
    return _current.get()


def enter(span: Span) -> None:
    """From here on `current` in this task, and in those that it begins."""
    if span or _current.get():
        _current.set(span)


def inside(span: Span, call: Callable[[], Answer]) -> Answer:
    """What `call` returns. The tasks and RPCs that it begins have `span` as their current one; this task keeps its own."""
    if not span:
        return call()

    def entered() -> Answer:
        _current.set(span)
        return call()

    return copy_context().run(entered)


def start(
    name: str,
    parent: Span = OFF,
    *,
    kind: Kind = "internal",
    attributes: Mapping[str, Value] | None = None,
    links: Iterable[Span] = (),
    seconds_ago: float = 0.0,
) -> Span:
    """A span below `parent`, or at the root of a trace of its own. OFF while tracing is off."""
    if _tracer is None:
        return OFF
    from opentelemetry import trace
    from opentelemetry.context import Context

    context = Context() if parent._span is None else trace.set_span_in_context(parent._span, Context())
    return Span(
        _tracer.start_span(
            name,
            context,
            kind=getattr(trace.SpanKind, kind.upper()),
            attributes=attributes,
            links=[trace.Link(link._span.get_span_context()) for link in links if link._span is not None],
            start_time=_at(seconds_ago),
        )
    )


def below(parent: Span, name: str, **options: Any) -> Span:
    """`start`, where there is a trace; OFF where there is none."""
    return start(name, parent, **options) if parent else OFF


def remote(traceparent: str | None) -> Span:
    """The span elsewhere that a traceparent names; OFF while tracing is off, or where it names none."""
    if _tracer is None or not traceparent:
        return OFF
    from opentelemetry.trace import INVALID_SPAN, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    span = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    return OFF if span is INVALID_SPAN else Span(span)


def is_on() -> bool:
    """Whether `setup` found an exporter named."""
    return _tracer is not None


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces: an OTLP endpoint or the exporter is named, and nothing says no.

    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise SettingsError(f"OTEL_TRACES_EXPORTER={exporter[:32]}: use otlp or none")
    named = (environment.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
    return exporter == "otlp" or any(named)


def setup(service: str) -> None:
    """Turns tracing on in this process if the environment asks for it. SettingsError where what it asks for can't be."""
    environment = os.environ
    if not is_wanted(environment):
        return
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol != "grpc":
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol[:32]}: use grpc, which collectors take on port 4317")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for name in _COMPLAINERS:
        logging.getLogger(name).addFilter(_Seldom())
    use(BatchSpanProcessor(OTLPSpanExporter()), service)


def use(processor: Any, service: str) -> None:
    """Spans of this process go to `processor`, an OpenTelemetry SpanProcessor."""
    global _tracer, _provider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create({semconv.SERVICE_INSTANCE_ID: str(uuid4())})
    if str(resource.attributes.get(semconv.SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({semconv.SERVICE_NAME: f"forebay-{service}"}))
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("forebay")


def shutdown() -> None:
    """Sends what is left, for two seconds at most: a collector that is away keeps nobody."""
    global _tracer, _provider
    provider, _tracer, _provider = _provider, None, None
    if provider is not None:
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_SECONDS)


def _at(seconds_ago: float) -> int:
    return time.time_ns() - round(1e9 * seconds_ago)


class _Seldom(logging.Filter):
    """One complaint a minute: without a collector there would be one at each export."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet_until = 0.0

    def filter(self, _: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + _QUIET_SECONDS
        return True
