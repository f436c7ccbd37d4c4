"""The gateway's metrics, forebay_*. Labels come from closed sets only: no ids, no orgs, no client's words."""

import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from forebay.v1 import inference_pb2, types_pb2

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
CLASS_NAMES = {
    types_pb2.LATENCY_CLASS_UNSPECIFIED: "",
    types_pb2.LATENCY_CLASS_REALTIME: "realtime",
    types_pb2.LATENCY_CLASS_STANDARD: "standard",
    types_pb2.LATENCY_CLASS_BATCH: "batch",
}


class GatewayMetrics:
    """All instruments of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        request = ["face", "model", "latency_class"]
        self.requests = Counter("forebay_requests", "Requests that ended, by gRPC status", [*request, "status"], registry=registry)
        self.running = Gauge("forebay_requests_in_flight", "Requests that have not ended", ["face"], registry=registry)
        self.ttft = Histogram(
            "forebay_time_to_first_token_seconds", "From admission to the first token", request, buckets=_SECONDS, registry=registry
        )
        self.itl = Histogram(
            "forebay_inter_token_seconds",
            "Mean gap between tokens inside a request's stream, per delta",
            request,
            buckets=_ITL_SECONDS,
            registry=registry,
        )
        self.duration = Histogram("forebay_request_seconds", "From admission to the end", request, buckets=_SECONDS, registry=registry)
        self.prompt_tokens = Counter(
            "forebay_prompt_tokens", "Prompt tokens of requests that produced an answer", request, registry=registry
        )
        self.cached_tokens = Counter("forebay_cached_prompt_tokens", "Those of them found in the prefix cache", request, registry=registry)
        self.output_tokens = Counter("forebay_output_tokens", "Tokens delivered", request, registry=registry)
        self.overrun_tokens = Counter(
            "forebay_overrun_tokens", "Tokens computed behind a stop string: never delivered, never billed", ["model"], registry=registry
        )
        self.replacements = Gauge(
            "forebay_replacements", "Requests placed again since the start, because a worker was lost or had no room", registry=registry
        )


@dataclass
class Observation:
    """One generation as the metrics see it."""

    metrics: GatewayMetrics
    face: str
    model: str
    latency_class: str
    start: float
    last_token: float = 0.0
    usage: types_pb2.Usage | None = None

    def delta(self, delta: inference_pb2.Delta) -> None:
        """New output."""
        if not delta.token_ids:
            return
        now = time.monotonic()
        labels = (self.face, self.model, self.latency_class)
        if self.last_token:
            self.metrics.itl.labels(*labels).observe((now - self.last_token) / len(delta.token_ids))
        else:
            self.metrics.ttft.labels(*labels).observe(now - self.start)
        self.last_token = now
        self.metrics.output_tokens.labels(*labels).inc(len(delta.token_ids))

    def ended(self, status: str) -> None:
        """The end, whichever."""
        labels = (self.face, self.model, self.latency_class)
        self.metrics.requests.labels(*labels, status).inc()
        self.metrics.duration.labels(*labels).observe(time.monotonic() - self.start)
        if self.usage is not None:
            self.metrics.prompt_tokens.labels(*labels).inc(self.usage.prompt_tokens)
            self.metrics.cached_tokens.labels(*labels).inc(self.usage.cached_tokens)
