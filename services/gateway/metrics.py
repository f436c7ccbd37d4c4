"""The gateway's metrics, forebay_*. Labels come from closed sets only: no ids, no client's words, and of orgs a bounded number."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from forebay.v1 import inference_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError
from services.common.metrics import exemplar
from services.gateway.client import MeshCall
from services.gateway.org_labels import OrgLabels
from services.gateway.request import Generation

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_PROMISED = frozenset({Code.OK, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.INTERNAL})
"""Ends that targets are held against: the others are the client's or its org's own."""
_QUOTA_REASONS = ("QUOTA_EXCEEDED", "REQUEST_TOO_LARGE")  # the scheduler's
CLASS_NAMES = {
    types_pb2.LATENCY_CLASS_UNSPECIFIED: "",
    types_pb2.LATENCY_CLASS_REALTIME: "realtime",
    types_pb2.LATENCY_CLASS_STANDARD: "standard",
    types_pb2.LATENCY_CLASS_BATCH: "batch",
}


class GatewayMetrics:
    """All instruments of one gateway."""

    def __init__(self, registry: CollectorRegistry, orgs: OrgLabels | None = None) -> None:
        """`orgs`: which have series of their own."""
        request, line, org = ["face", "model", "latency_class"], ["model", "latency_class"], ["org"]
        self._org_labels = orgs or OrgLabels()
        self._lines: dict[tuple[str, str, str], Line] = {}
        self._orgs: dict[str, Org] = {}

        def counter(name: str, text: str, labels: Sequence[str] = request) -> Counter:
            return Counter(f"forebay_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"forebay_{name}_seconds", text, request, buckets=buckets, registry=registry)

        self.calls = counter("calls", "Calls of either face by the status that they began to answer with", ["face", "method", "status"])
        self.requests = counter("requests", "Requests that ended, by gRPC status", [*request, "status"])
        self.ttft = histogram("time_to_first_token", "From admission to the first token")
        self.itl = histogram("inter_token", "Gap between the tokens of a stream, averaged over each message", _ITL_SECONDS)
        self.duration = histogram("request", "From admission to the end")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced an answer")
        self.cached_tokens = counter("cached_prompt_tokens", "Those of them found in the prefix cache")
        self.output_tokens = counter("output_tokens", "Tokens delivered")
        self.embedded_inputs = counter("embedded_inputs", "Inputs of which vectors were delivered")
        self.overrun_tokens = counter("overrun_tokens", "Tokens received behind a stop string: never delivered, never billed")
        self.promised = counter("slo_requests", "Requests whose class had targets, but for those that their clients ended", line)
        self.kept = counter("slo_met", "Those of them that met the targets for the first token and for each further one", line)
        self.replacements = Counter("forebay_replacements", "Requests placed again: a worker was lost or had no room", registry=registry)
        self.migrations = Counter("forebay_migrations", "Those of them that the client had tokens of already", registry=registry)
        self.batch_lines = counter(
            "batch_lines", "Lines of jobs: completed, failed, returned to be run later, lost to others, refused as another's", ["result"]
        )
        for result in ("completed", "failed", "returned", "lost", "refused"):
            self.batch_lines.labels(result)
        self.batch_in_flight = Gauge("forebay_batch_lines_in_flight", "Lines of jobs that run here", registry=registry)
        self.batch_runner_failures = Counter(
            "forebay_batch_runner_failures", "Times that what runs jobs broke and began anew", registry=registry
        )
        self.running = Gauge("forebay_requests_in_flight", "Requests that have not ended", ["face"], registry=registry)
        self.org_requests = counter("org_requests", "Requests that ended, by org", org)
        self.org_errors = counter("org_errors", "Those of them that failed, by org", org)
        self.org_quota_refused = counter("org_quota_refused", "Those of them that were over the org's quota", org)
        self.org_prompt_tokens = counter("org_prompt_tokens", "Prompt tokens of requests that produced an answer, by org", org)
        self.org_output_tokens = counter("org_output_tokens", "Tokens delivered, by org", org)

    def line(self, face: str, model: str, latency_class: str) -> "Line":
        """The series of all requests that are alike; looked up once, as each label costs a microsecond."""
        labels = (face, model, latency_class)
        if labels not in self._lines:
            self._lines[labels] = Line(
                ttft=self.ttft.labels(*labels),
                itl=self.itl.labels(*labels),
                duration=self.duration.labels(*labels),
                prompt_tokens=self.prompt_tokens.labels(*labels),
                cached_tokens=self.cached_tokens.labels(*labels),
                output_tokens=self.output_tokens.labels(*labels),
                overrun_tokens=self.overrun_tokens.labels(*labels),
            )
        return self._lines[labels]

    def charge(self, org: str, error: StatusError | None, status: Code, *, prompt_tokens: int, output_tokens: int) -> None:
        """A request's end, to its org; `error` where it is one."""
        series = self.org(org)
        series.requests.inc()
        series.errors.inc(status not in (Code.OK, Code.CANCELLED))
        series.quota_refused.inc(error is not None and error.reason in _QUOTA_REASONS)
        series.prompt_tokens.inc(prompt_tokens)
        series.output_tokens.inc(output_tokens)

    def org(self, org: str) -> "Org":
        """The series of an org, or those of all that have none of their own."""
        label = self._org_labels.of(org)
        if label not in self._orgs:
            counters = (self.org_requests, self.org_errors, self.org_quota_refused, self.org_prompt_tokens, self.org_output_tokens)
            self._orgs[label] = Org(*(counter.labels(label) for counter in counters))
        return self._orgs[label]


@dataclass(frozen=True)
class Line:
    """Of one face, model and class."""

    ttft: Histogram
    itl: Histogram
    duration: Histogram
    prompt_tokens: Counter
    cached_tokens: Counter
    output_tokens: Counter
    overrun_tokens: Counter


@dataclass(frozen=True)
class Org:
    """Of one org."""

    requests: Counter
    errors: Counter
    quota_refused: Counter
    prompt_tokens: Counter
    output_tokens: Counter


@dataclass
class Observation:
    """One generation as the metrics see it. `trace_id`: of its trace, while it is traced."""

    metrics: GatewayMetrics
    face: str
    generation: Generation
    trace_id: str | None = None
    start: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    last_token: float = 0.0
    usage: types_pb2.Usage | None = None
    ttft_target: float = 0.0
    tpot_target: float = 0.0

    def __post_init__(self) -> None:
        self._labels = (self.generation.model.name, CLASS_NAMES[self.generation.latency_class])
        self._line = self.metrics.line(self.face, *self._labels)
        self._itl, self._output_tokens = self._line.itl, self._line.output_tokens

    def leased(self, lease: scheduler_pb2.Lease) -> None:
        """What its class was promised comes with the lease."""
        self.ttft_target, self.tpot_target = lease.ttft_target_seconds, lease.tpot_target_seconds

    def delta(self, delta: inference_pb2.Delta) -> None:
        """New output."""
        if not delta.token_ids:
            return
        now = time.monotonic()
        if self.last_token:
            self._itl.observe((now - self.last_token) / len(delta.token_ids))
        else:
            self.first_token = now
            self._line.ttft.observe(now - self.start, exemplar(self.trace_id))
        self.last_token = now
        self._output_tokens.inc(len(delta.token_ids))

    def ended(self, call: MeshCall, error: StatusError | None, status: Code) -> None:
        """The end, whichever; `error` where it is one."""
        metrics, line = self.metrics, self._line
        metrics.requests.labels(self.face, *self._labels, status.name).inc()
        line.duration.observe(time.monotonic() - self.start, exemplar(self.trace_id))
        line.overrun_tokens.inc(call.num_overrun_tokens)
        metrics.replacements.inc(call.num_replacements)
        metrics.migrations.inc(call.num_migrations)
        if self.usage is not None:
            line.prompt_tokens.inc(self.usage.prompt_tokens)
            line.cached_tokens.inc(self.usage.cached_tokens)
        if (self.ttft_target or self.tpot_target) and status in _PROMISED:
            metrics.promised.labels(*self._labels).inc()
            metrics.kept.labels(*self._labels).inc(status is Code.OK and self._in_time(call))
        prompt_tokens = 0 if self.usage is None else self.usage.prompt_tokens
        output_tokens = sum(len(choice.token_ids) for choice in call.choices)
        metrics.charge(self.generation.org, error, status, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def _in_time(self, call: MeshCall) -> bool:
        longest = max(len(choice.token_ids) for choice in call.choices)
        seconds_per_token = (self.last_token - self.first_token) / max(1, longest - 1)
        in_time = not self.ttft_target or self.first_token - self.start <= self.ttft_target
        return in_time and (not self.tpot_target or seconds_per_token <= self.tpot_target)
