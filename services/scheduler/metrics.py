"""What a scheduler counts, for Prometheus: forebay_* by model and class."""

from collections.abc import Callable, Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from forebay.v1 import scheduler_pb2, types_pb2
from services.scheduler import keys

_WAIT_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One scheduler's instruments in their own registry."""

    def __init__(self, num_redis_failures: Callable[[], int], num_policy_failures: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        line = ("model", "latency_class")
        self.queue_depth = Gauge("forebay_queue_depth", "Tickets waiting, in the whole mesh.", line, registry=self.registry)
        self.queue_oldest = Gauge("forebay_queue_oldest_seconds", "Age of the oldest waiting ticket.", line, registry=self.registry)
        self.queue_wait = Histogram(
            "forebay_queue_wait_seconds", "Arrival to placement.", line, buckets=_WAIT_BUCKETS, registry=self.registry
        )
        self.placements = Counter("forebay_placements", "Leases committed by this scheduler.", line, registry=self.registry)
        self.refused_commits = Counter("forebay_commits_refused", "Placements that lost a race.", ("reason",), registry=self.registry)
        self.finished = Counter("forebay_finished", "Requests ended, as told here.", (*line, "reason"), registry=self.registry)
        self.shed = Counter("forebay_shed", "Requests refused by or put out of a full queue, as told here.", line, registry=self.registry)
        self.quota_refused = Counter(
            "forebay_quota_refused",
            "Requests refused: requests, tokens, concurrent, or too large for any bucket.",
            ("kind",),
            registry=self.registry,
        )
        self.live_leases = Gauge("forebay_leases", "Live leases, in the whole mesh.", registry=self.registry)
        self.workers_ready = Gauge("forebay_workers_ready", "Attached workers that take new work.", ("model",), registry=self.registry)
        self.waiting_streams = Gauge("forebay_place_streams", "Place streams waiting at this scheduler.", registry=self.registry)
        self.registry.register(_Tally("forebay_redis_failures", "Calls to Redis that failed.", num_redis_failures))
        words = "Changes of the policy file that can't be used."
        self.registry.register(_Tally("forebay_policy_failures", words, num_policy_failures))

    def ended(self, line: str, reason: str) -> None:
        """A request of this line ('' if it isn't known) is over."""
        model, latency_class = keys.parse_line(line) if line else ("", 0)
        self.finished.labels(model, class_label(latency_class), reason).inc()

    def show_queues(self, lines: dict[tuple[str, int], tuple[int, float]]) -> None:
        """(model, class) -> (tickets, age of the oldest); lines that are not named are empty."""
        self.queue_depth.clear()
        self.queue_oldest.clear()
        for (model, latency_class), (num, oldest) in lines.items():
            self.queue_depth.labels(model, class_label(latency_class)).set(num)
            self.queue_oldest.labels(model, class_label(latency_class)).set(oldest)


class _Tally(Collector):
    """A counter that somebody else keeps."""

    def __init__(self, name: str, documentation: str, read: Callable[[], int]) -> None:
        self._name = name
        self._documentation = documentation
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What Prometheus asks for."""
        yield CounterMetricFamily(self._name, self._documentation, value=self._read())


def class_label(latency_class: int) -> str:
    """1 -> realtime."""
    return types_pb2.LatencyClass.Name(types_pb2.LatencyClass.ValueType(latency_class)).removeprefix("LATENCY_CLASS_").lower()


def finish_label(request: scheduler_pb2.FinishRequest) -> str:
    """stop, length, cancelled ...; the status code's name for a request that failed."""
    if request.finish_reason:
        return types_pb2.FinishReason.Name(request.finish_reason).removeprefix("FINISH_REASON_").lower()
    codes = {code.value[0]: code.name.lower() for code in grpc.StatusCode}
    return codes.get(request.status_code, "unknown") if request.status_code else "unspecified"
