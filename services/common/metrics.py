"""What every process measures of itself, and what prometheus-client lacks: figures that somebody else keeps, exemplars.

Figures that exist elsewhere are read when Prometheus asks, not written whenever they change.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, Histogram, Metric, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

Rows = Iterable[tuple[Sequence[str], float]]
"""Label values, and what is true of them now."""

_OPENMETRICS = "application/openmetrics-text"
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LAG_SECONDS = 1.0


class Figure(Collector):
    """A family that somebody else keeps: a gauge without rows, or one of a row that is gone, has no series."""

    def __init__(
        self, name: str, documentation: str, read: Callable[[], Rows], labels: Sequence[str] = (), *, counter: bool = False
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._read = read
        self._labels = labels
        self._family: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily if counter else GaugeMetricFamily

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for."""
        family = self._family(self._name, self._documentation, labels=self._labels)
        for values, value in self._read():
            family.add_metric(values, value)
        yield family


def gauge(name: str, documentation: str, read: Callable[[], float]) -> Figure:
    """A gauge of one series."""
    return Figure(name, documentation, lambda: [((), read())])


def counter(name: str, documentation: str, read: Callable[[], float]) -> Figure:
    """A counter of one series."""
    return Figure(name, documentation, lambda: [((), read())], counter=True)


def exemplar(trace_id: str | None) -> dict[str, str] | None:
    """What an observation carries so that a dashboard leads to its trace. None, and without cost, where there is no trace."""
    return {"trace_id": trace_id} if trace_id else None


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """(body, content type): OpenMetrics, which has room for exemplars, where the Accept header takes it, else Prometheus's text.

    The library's own choice would write `_` for the `:` of vLLM's names into OpenMetrics; with UTF-8 allowed it leaves names alone.
    """
    if _OPENMETRICS in accept:
        body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]  # theirs
        return body, f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class LoopLag:
    """How late the event loop comes to what is due, seen once a second: what every stream waits for beside all else."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "forebay_event_loop_lag_seconds", "How late the event loop ran a timer.", buckets=_LAG_BUCKETS, registry=registry
        )
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Looks from now on, on the running loop."""
        loop = asyncio.get_running_loop()
        self._due(loop, loop.time() + _LAG_SECONDS)

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _due(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self._timer = loop.call_at(at, self._tick, loop, at)

    def _tick(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        now = loop.time()
        self._lag.observe(max(0.0, now - at))
        self._due(loop, now + _LAG_SECONDS)


def add_process(registry: CollectorRegistry) -> None:
    """CPU, memory and open files of this process, and which build it is."""
    # Or every counter and histogram would have a second series.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
    ProcessCollector(registry=registry)
    Gauge("forebay_build_info", "1, of the version that runs.", ("version",), registry=registry).labels(_version()).set(1)


def _version() -> str:
    try:
        return version("forebay")
    except PackageNotFoundError:  # run from sources that nobody has installed
        return "unknown"
