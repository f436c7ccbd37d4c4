"""The gateway's metrics, forebay_*. Labels come from closed sets only: no ids, no orgs, no client's words."""

import time
from collections.abc import Sequence
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

        def counter(name: str, text: str, labels: Sequence[str] = request) -> Counter:
            return Counter(f"forebay_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"forebay_{name}_seconds", text, request, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that ended, by gRPC status", [*request, "status"])
        self.ttft = histogram("time_to_first_token", "From admission to the first token")
        self.itl = histogram("inter_token", "Gap between the tokens of a stream, averaged over each message", _ITL_SECONDS)
        self.duration = histogram("request", "From admission to the end")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced an answer")
        self.cached_tokens = counter("cached_prompt_tokens", "Those of them found in the prefix cache")
        self.output_tokens = counter("output_tokens", "Tokens delivered")
        self.overrun_tokens = counter("overrun_tokens", "Tokens received behind a stop string: never delivered, never billed")
        self.replacements = Counter("forebay_replacements", "Requests placed again: a worker was lost or had no room", registry=registry)
        self.running = Gauge("forebay_requests_in_flight", "Requests that have not ended", ["face"], registry=registry)


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

    def __post_init__(self) -> None:
        labels = (self.face, self.model, self.latency_class)
        self._ttft, self._itl = self.metrics.ttft.labels(*labels), self.metrics.itl.labels(*labels)
        self._output_tokens = self.metrics.output_tokens.labels(*labels)

    def delta(self, delta: inference_pb2.Delta) -> None:
        """New output."""
        if not delta.token_ids:
            return
        now = time.monotonic()
        if self.last_token:
            self._itl.observe((now - self.last_token) / len(delta.token_ids))
        else:
            self._ttft.observe(now - self.start)
        self.last_token = now
        self._output_tokens.inc(len(delta.token_ids))

    def ended(self, status: str, *, num_overrun_tokens: int = 0, num_replacements: int = 0) -> None:
        """The end, whichever."""
        labels = (self.face, self.model, self.latency_class)
        self.metrics.overrun_tokens.labels(*labels).inc(num_overrun_tokens)
        self.metrics.replacements.inc(num_replacements)
        self.metrics.requests.labels(*labels, status).inc()
        self.metrics.duration.labels(*labels).observe(time.monotonic() - self.start)
        if self.usage is not None:
            self.metrics.prompt_tokens.labels(*labels).inc(self.usage.prompt_tokens)
            self.metrics.cached_tokens.labels(*labels).inc(self.usage.cached_tokens)
