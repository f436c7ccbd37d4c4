"""What a scheduler counts, for Prometheus: forebay_* by model and class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from forebay.v1 import scheduler_pb2, types_pb2
from services.common.metrics import Figure, Rows, counter, gauge
from services.scheduler import keys

DECISIONS = ("free", "preempts", "waits", "ticket", "deadline", "suspect", "incarnation", "down", "refusing", "room", "share")
"""What a placement counted on there, or what of it didn't hold when it was committed."""
_QUOTA_KINDS = ("requests", "tokens", "concurrent", "size")
_WAIT_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One scheduler's instruments in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        line = ("model", "latency_class")
        self.queue_wait = Histogram(
            "forebay_queue_wait_seconds", "Arrival to placement.", line, buckets=_WAIT_BUCKETS, registry=self.registry
        )
        self.placements = Counter("forebay_placements", "Leases committed by this scheduler.", line, registry=self.registry)
        self.decisions = Counter(
            "forebay_decisions",
            "Placements chosen here: free (there was room), preempts, waits (for a slot there), or what didn't hold at the commit.",
            ("reason",),
            registry=self.registry,
        )
        self.finished = Counter("forebay_finished", "Requests ended, as told here.", (*line, "reason"), registry=self.registry)
        self.shed = Counter("forebay_shed", "Requests refused by or put out of a full queue, as told here.", line, registry=self.registry)
        self.quota_refused = Counter(
            "forebay_quota_refused",
            "Requests refused: requests, tokens, concurrent, or size: too large for any bucket.",
            ("kind",),
            registry=self.registry,
        )
        self.quarantined = Counter("forebay_quarantined", "Requests that workers died of, as told here.", line, registry=self.registry)
        self.prefetches = Counter(
            "forebay_prefetches",
            "Models that this scheduler had brought to a device ahead of requests.",
            ("model",),
            registry=self.registry,
        )
        for kind in _QUOTA_KINDS:
            self.quota_refused.labels(kind)
        for reason in DECISIONS:
            self.decisions.labels(reason)

    def quarantine(self, line: str) -> None:
        """A request of this line ('' if it isn't known) has killed two workers."""
        model, latency_class = keys.parse_line(line) if line else ("", 0)
        self.quarantined.labels(model, class_label(latency_class)).inc()

    def ended(self, line: str, reason: str) -> None:
        """A request of this line ('' if it isn't known) is over."""
        model, latency_class = keys.parse_line(line) if line else ("", 0)
        self.finished.labels(model, class_label(latency_class), reason).inc()

    def show(self, state: "State") -> None:
        """Shows how things stand whenever Prometheus asks, so that nothing outlives what it is said of."""
        line = ("model", "latency_class")
        for figure in (
            Figure("forebay_queue_depth", "Tickets waiting, in the whole mesh.", lambda: _rows(state.lines(), 0), line),
            Figure("forebay_queue_oldest_seconds", "Age of the oldest waiting ticket.", lambda: _rows(state.lines(), 1), line),
            Figure(
                "forebay_workers_ready",
                "Attached workers that take new work.",
                lambda: [((model,), num) for model, num in state.workers_ready().items()],
                ("model",),
            ),
            Figure(
                "forebay_worker_heartbeat_age_seconds",
                "Since the last word of each attached worker.",
                lambda: [((worker,), age) for worker, age in state.heartbeat_ages().items()],
                ("worker",),
            ),
            # Requests wait here and not at workers, so what scales by this name must find them here. Each is told by one scheduler alone.
            Figure(
                "vllm:num_requests_waiting",
                "Requests that wait at this scheduler to be placed.",
                lambda: [((model, "queue"), num) for model, num in state.waiting().items()],
                ("model_name", "engine"),
            ),
            Figure(
                "forebay_sharing_load",
                "Tokens placed per second over what a worker's models manage beside each other, summed: sharing is efficient below 1. "
                "Told by the scheduler that brings models ahead.",
                lambda: [((worker,), load) for worker, load in state.sharing_loads().items()],
                ("worker",),
            ),
            gauge("forebay_leases", "Live leases, in the whole mesh.", state.num_leases),
            gauge("forebay_place_streams", "Place streams waiting at this scheduler.", state.num_streams),
            gauge("forebay_batches_open", "Jobs that are not over, in the whole mesh.", state.open_batches),
            gauge("forebay_batch_stored_bytes", "Bytes of files and results that are kept, in the whole mesh.", state.stored_bytes),
            gauge("forebay_redis_away", "1 while Redis doesn't answer.", state.redis_away),
            counter("forebay_redis_failures", "Calls to Redis that failed.", state.num_redis_failures),
            gauge("forebay_policy_refused", "1 while the policy file, as it is, can't be used.", state.policy_refused),
            counter("forebay_policy_failures", "Changes of the policy file that can't be used.", state.num_policy_failures),
        ):
            self.registry.register(figure)


@dataclass(frozen=True)
class State:
    """Where the figures that others keep are read."""

    lines: Callable[[], Mapping[tuple[str, int], tuple[int, float]]]
    """(model, class) -> (tickets, age of the oldest); lines that are not named are empty."""
    waiting: Callable[[], Mapping[str, int]]
    """Model -> streams that wait here."""
    workers_ready: Callable[[], Mapping[str, int]]
    heartbeat_ages: Callable[[], Mapping[str, float]]
    sharing_loads: Callable[[], Mapping[str, float]]
    num_leases: Callable[[], int]
    num_streams: Callable[[], int]
    redis_away: Callable[[], bool]
    num_redis_failures: Callable[[], int]
    policy_refused: Callable[[], bool]
    num_policy_failures: Callable[[], int]
    open_batches: Callable[[], int]
    stored_bytes: Callable[[], int]


def _rows(lines: Mapping[tuple[str, int], tuple[int, float]], index: int) -> Rows:
    return [((model, class_label(latency_class)), figures[index]) for (model, latency_class), figures in lines.items()]


def class_label(latency_class: int) -> str:
    """1 -> realtime."""
    return types_pb2.LatencyClass.Name(types_pb2.LatencyClass.ValueType(latency_class)).removeprefix("LATENCY_CLASS_").lower()


def finish_label(request: scheduler_pb2.FinishRequest) -> str:
    """stop, length, cancelled ...; the status code's name for a request that failed."""
    if request.finish_reason:
        return types_pb2.FinishReason.Name(request.finish_reason).removeprefix("FINISH_REASON_").lower()
    codes = {code.value[0]: code.name.lower() for code in grpc.StatusCode}
    return codes.get(request.status_code, "unknown") if request.status_code else "unspecified"
