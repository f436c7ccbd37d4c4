"""A worker's Prometheus metrics under vLLM's names, labels and buckets, so that its dashboards, alerts and autoscalers fit.

What the engine counts is read from it (engine_figures); here is what requests and steps are observed with.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from services.common.metrics import Figure, Rows, counter, exemplar
from services.worker import device_figures, engine_figures, weights_figures
from services.worker.engine_figures import LABELS
from services.worker.sharing.device import Stats
from services.worker.sharing.weights import Weights
from services.worker.telemetry import Sensors
from services.worker.throughput import Throughput

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
N_BUCKETS = (1, 2, 5, 10, 20)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
"""vLLM's; nothing here ends by repetition."""
TOKEN_GAPS = ("vllm:inter_token_latency_seconds", "Time between tokens.")


class Renamed(Collector):
    """Shows a histogram under a second name, without paying for a second one at each token."""

    def __init__(self, histogram: Histogram, name: str, text: str) -> None:
        self._histogram = histogram
        self._name = name
        self._text = text

    def collect(self) -> Iterator[Metric]:
        """The histogram's samples, renamed."""
        for family in self._histogram.collect():
            renamed = Metric(self._name, self._text, family.type)
            renamed.samples = [sample._replace(name=sample.name.replace(family.name, self._name)) for sample in family.samples]
            yield renamed


@dataclass(frozen=True)
class Ended:
    """A request that is over. Times in seconds by one clock; None: it never came so far."""

    reason: str  # one of FINISHED_REASONS
    arrived_at: float
    ended_at: float
    n: int
    num_prompt_tokens: int
    num_output_tokens: int  # new ones, over all choices
    num_longest_tokens: int  # of its longest choice
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    started_at: float | None = None  # its first choice was admitted to the batch
    first_token_at: float | None = None
    last_token_at: float | None = None
    trace_id: str | None = None


class Families:
    """The families that the models' series belong to; whoever needs one first makes it."""

    def __init__(self, registry: CollectorRegistry, lengths: Sequence[float]) -> None:
        """`lengths`: buckets of what is counted in tokens of a sequence."""
        self.lengths = lengths
        self._registry = registry
        self._histograms: dict[str, Histogram] = {}
        self._counters: dict[str, Counter] = {}

    def counter(self, name: str, text: str, *more: str) -> Counter:
        """With LABELS and `more`."""
        if name not in self._counters:
            self._counters[name] = Counter(name, text, (*LABELS, *more), registry=self._registry)
        return self._counters[name]

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """With LABELS."""
        if name not in self._histograms:
            self._histograms[name] = Histogram(name, text, LABELS, registry=self._registry, buckets=buckets)
        return self._histograms[name]


class Metrics:
    """Every series of one model on one worker. Each exists from the start, at zero."""

    def __init__(self, families: Families, model_name: str, throughput: Throughput) -> None:
        self.labels = (model_name, "0")
        self.throughput = throughput
        self._families = families
        self.refused = self._counter("forebay_worker_refused_requests", "Requests refused because there was no room.")
        self._steps = self._counter("forebay_worker_steps", "Steps of the engine.")
        self._step_seconds = self._counter("forebay_worker_step_seconds", "Seconds that the engine was stepping.")
        success = families.counter("vllm:request_success", "Ended requests, by reason.", "finished_reason")
        self._success = {reason: success.labels(*self.labels, reason) for reason in FINISHED_REASONS}
        self._add_sizes(families.lengths)
        self._add_latencies()

    def _add_sizes(self, lengths: Sequence[float]) -> None:
        histogram = self._histogram
        self._prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt length in tokens.", lengths)
        self._generation_tokens = histogram("vllm:request_generation_tokens", "Output length in tokens.", lengths)
        self._longest_tokens = histogram("vllm:request_max_num_generation_tokens", "Length of the longest choice.", lengths)
        self._prefill_tokens = histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that no cache had.", lengths)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of requests.", lengths)
        self._n = histogram("vllm:request_params_n", "n of requests.", N_BUCKETS)
        self._preemptions = histogram("vllm:request_num_preemptions", "Preemptions of a request's choices.", PREEMPTIONS_BUCKETS)
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens per engine step.", STEP_TOKENS_BUCKETS)

    def _add_latencies(self) -> None:
        histogram = self._histogram
        self._time_to_first_token = histogram("vllm:time_to_first_token_seconds", "Time to the first token.", TTFT_BUCKETS)
        self.inter_token_latency = histogram(*TOKEN_GAPS, TOKEN_SECONDS_BUCKETS)
        self._time_per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per further token of a request.", TOKEN_SECONDS_BUCKETS
        )
        self._latency = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to end.", LATENCY_BUCKETS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to the first step.", LATENCY_BUCKETS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token.", LATENCY_BUCKETS)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last.", LATENCY_BUCKETS)
        self._inference = histogram("vllm:request_inference_time_seconds", "First step to last token.", LATENCY_BUCKETS)

    def observe_steps(self, step_tokens: Sequence[int], seconds: float) -> None:
        """Some steps that took so long together; each computed so many tokens."""
        self._steps.inc(len(step_tokens))
        self._step_seconds.inc(seconds)
        self.throughput.record_steps(time.monotonic(), len(step_tokens), seconds)
        for num_tokens in step_tokens:
            if num_tokens:
                self._step_tokens.observe(num_tokens)

    def observe_request(self, *, n: int, max_tokens: int) -> None:
        """A request that was admitted."""
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def observe_first_token(self, seconds: float, trace_id: str | None = None) -> None:
        """The first token of a request, so long after its arrival."""
        self._time_to_first_token.observe(seconds, exemplar(trace_id))

    def observe_end(self, end: Ended) -> None:
        """A request that is over."""
        self._success[end.reason].inc()
        self._latency.observe(end.ended_at - end.arrived_at, exemplar(end.trace_id))
        self._prompt_tokens.observe(end.num_prompt_tokens)
        self._generation_tokens.observe(end.num_output_tokens)
        self._longest_tokens.observe(end.num_longest_tokens)
        self._preemptions.observe(end.num_preemptions)
        if end.first_token_at is None or end.last_token_at is None or end.started_at is None:
            return
        self._prefill_tokens.observe(end.num_prompt_tokens - end.num_cached_tokens)
        # The engine's clock may be another than the event loop's by a hair.
        self._queue.observe(max(0.0, end.started_at - end.arrived_at))
        self._prefill.observe(max(0.0, end.first_token_at - end.started_at))
        self._decode.observe(end.last_token_at - end.first_token_at)
        self._inference.observe(max(0.0, end.last_token_at - end.started_at))
        if end.num_longest_tokens > 1:
            self._time_per_token.observe((end.last_token_at - end.first_token_at) / (end.num_longest_tokens - 1))
        self.throughput.record_end(end.ended_at, n=end.n, num_prompt_tokens=end.num_prompt_tokens, num_output_tokens=end.num_output_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return self._families.counter(name, text).labels(*self.labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._families.histogram(name, text, buckets).labels(*self.labels)


class WorkerMetrics:
    """The series of a worker: of each of its models, and of what they share."""

    def __init__(self, registry: CollectorRegistry, throughputs: Mapping[str, Throughput], *, max_model_len: int) -> None:
        """`throughputs` by model; `max_model_len`: the longest of theirs."""
        families = Families(registry, one_two_five(max_model_len))
        self.models = {model: Metrics(families, model, throughput) for model, throughput in throughputs.items()}
        self._registry = registry
        gaps = families.histogram(*TOKEN_GAPS, TOKEN_SECONDS_BUCKETS)
        registry.register(Renamed(gaps, "vllm:time_per_output_token_seconds", "Time between tokens; the older name."))
        theta = "Sequences per second that lengths, cache and step times of the last minute allow."
        self._add_known("forebay_worker_theta_max", theta, Throughput.theta_max)
        self._add_known("forebay_worker_theta_share", "What the sequences of the last minute came to of theta_max.", Throughput.share)
        words = "Sum over the models of what each came to of its theta_max: below 1 they share the device at no cost to each other."
        registry.register(Figure("forebay_worker_sharing_load", words, self._sharing_load))
        self._healthy = Gauge(
            "forebay_worker_step_loop_healthy", "0 while the step loop has work and makes no progress.", LABELS, registry=registry
        )
        self.tell_healthy(False)

    def tell_healthy(self, healthy: bool) -> None:
        """Whether the step loop makes progress, which is all models' loop."""
        for metrics in self.models.values():
            self._healthy.labels(*metrics.labels).set(healthy)

    def watch(
        self,
        stats: Callable[[], Mapping[str, Stats]],
        num_stale_outputs: Callable[[], int],
        sensors: Sensors,
        weights: Weights | None = None,
    ) -> None:
        """Shows what engines, loop, device and weights say of themselves whenever they are asked for. `stats` by model."""
        of_weights = () if weights is None else weights_figures.figures(weights)
        for figure in (*engine_figures.figures(stats), *device_figures.figures(sensors), *of_weights):
            self._registry.register(figure)
        words = "Outputs of requests that had ended already; dropped."
        self._registry.register(counter("forebay_worker_stale_outputs", words, num_stale_outputs))

    def describe_caches(self, facts: Sequence[Mapping[str, object]]) -> None:
        """What holds of each cache for the worker's life, by vLLM's names, and that there are no adapters: balancers look for both."""
        names = sorted(facts[0]) if facts else []
        info = Gauge("vllm:cache_config_info", "1, with the cache's settings.", (*names, "engine"), registry=self._registry)
        for cache in facts:
            info.labels(*(str(cache[name]) for name in names), "0").set(1)
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        adapters = Gauge("vllm:lora_requests_info", "When adapters were last looked at.", labels, registry=self._registry)
        adapters.labels("0", "", "").set_to_current_time()

    def _sharing_load(self) -> Rows:
        """Each theta_max is of the whole cache, so it is lambda / mu summed (SPEC 7). No row while nobody knows any."""
        now = time.monotonic()
        shares = [share for metrics in self.models.values() if (share := metrics.throughput.share(now)) is not None]
        return [((), sum(shares))] if shares else []

    def _add_known(self, name: str, text: str, read: Callable[[Throughput, float], float | None]) -> None:
        """A gauge that has no series where nobody knows it."""

        def rows() -> Iterator[tuple[tuple[str, str], float]]:
            for metrics in self.models.values():
                value = read(metrics.throughput, time.monotonic())
                if value is not None:
                    yield metrics.labels, value

        self._registry.register(Figure(name, text, rows, LABELS))


def one_two_five(maximum: int) -> list[float]:
    """1, 2, 5, 10, 20 ... up to `maximum`; at least [1]."""
    buckets = [float(mantissa * 10**exponent) for exponent in range(len(str(maximum))) for mantissa in (1, 2, 5)]
    return [bucket for bucket in buckets if bucket <= maximum] or [1.0]
