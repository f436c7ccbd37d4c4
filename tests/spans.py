"""Where tests look at spans: those of this process, and those that other processes export by OTLP."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from services.common import tracing


@dataclass
class Recorded(SpanProcessor):
    """Spans of this process that have begun, and those that have ended."""

    num_started: int = 0
    ended: list[ReadableSpan] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.num_started += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)
        self._news.set()

    async def all_ended(self, num: int) -> None:
        """Until at least so many have begun, and all of these have ended."""
        async with asyncio.timeout(20):
            while not self.num_started == len(self.ended) >= num:
                self._news.clear()
                await self._news.wait()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.ended if span.name == name]


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Tracing is on in this process meanwhile."""
    spans = Recorded()
    tracing.use(spans, "test")
    try:
        yield spans
    finally:
        tracing.shutdown()


@dataclass(frozen=True)
class Exported:
    """A span that came by OTLP."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    error: bool
    attributes: dict[str, Any]
    events: list[str]
    links: list[str]
    seconds: float


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver on loopback, in place of a collector."""

    def __init__(self) -> None:
        self.spans: list[Exported] = []
        self.raw: list[bytes] = []
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        with self._news:
            self.raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                self.spans += [_read(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, enough: Callable[[list[Exported]], bool], seconds: float = 30) -> list[Exported]:
        """All spans so far, once there are enough."""
        with self._news:
            assert self._news.wait_for(lambda: enough(self.spans), seconds), [(span.service, span.name) for span in self.spans]
            return list(self.spans)


def _read(service: str, span: trace_pb2.Span) -> Exported:
    return Exported(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
        events=[event.name for event in span.events],
        links=[link.span_id.hex() for link in span.links],
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
