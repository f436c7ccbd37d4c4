"""A worker's Prometheus metrics under vLLM's names, labels and buckets, so that its dashboards and alerts fit.

Counters of the engine are cumulative there; here only their growth is added.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from services.worker.engine.engine import EngineStats

LABELS = ("model_name", "engine")
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
FINISHED_REASONS = ("stop", "length", "abort", "error")


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


class Metrics:
    """Every series of one model on one worker. Each exists from the start, at zero."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, max_model_len: int) -> None:
        self._registry = registry
        self._labels = (model_name, "0")
        lengths = one_two_five(max_model_len)
        self.num_requests_running = self._gauge("vllm:num_requests_running", "Sequences in the running batch.")
        self.num_requests_waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for room.")
        self.kv_cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of cache blocks in use, 0 .. 1.")
        self.healthy = self._gauge("forebay_worker_step_loop_healthy", "0 while the step loop has work and makes no progress.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.prefix_cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.host_cache_usage = self._gauge("vllm:kv_offload_cpu_cache_usage_perc", "Share of host blocks that hold one, 0 .. 1.")
        self.host_queries = self._counter("vllm:external_prefix_cache_queries", "Prompt tokens that the host was asked for.")
        self.host_hits = self._counter("vllm:external_prefix_cache_hits", "Prompt tokens that came back from the host.")
        self.copied_out = self._counter("forebay_worker_copied_out_blocks", "Cache blocks copied to the host.")
        self.copied_in = self._counter("forebay_worker_copied_in_blocks", "Cache blocks copied back from the host.")
        self.num_preemptions = self._counter("vllm:num_preemptions", "Preempted sequences.")
        self.class_preemptions = self._counter("forebay_worker_class_preemptions", "Of these, in favour of a more urgent class.")
        self.capacity_preemptions = self._counter("forebay_worker_capacity_preemptions", "Of these, so that others could grow.")
        self.swaps = self._counter("forebay_worker_swaps", "Preemptions after which nothing is computed again; the others recompute.")
        self.swapped_blocks = self._counter("forebay_worker_swapped_blocks", "Cache blocks kept for preempted sequences.")
        self.swapped_tokens = self._counter("forebay_worker_swapped_tokens", "Tokens that preempted sequences needn't compute again.")
        self.step_time_error = self._gauge("forebay_worker_step_time_error", "Mean relative error of foretold step times, 0: none.")
        self.num_drafts = self._counter("vllm:spec_decode_num_drafts", "Verifications: a sequence's drafts in one step.")
        self.num_draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.num_accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.stale_outputs = self._counter("forebay_worker_stale_outputs", "Outputs of requests that had ended already; dropped.")
        self.refused = self._counter("forebay_worker_refused_requests", "Requests refused because there was no room.")
        self.request_success = Counter(
            "vllm:request_success", "Ended requests, by reason.", (*LABELS, "finished_reason"), registry=registry
        )
        for reason in FINISHED_REASONS:
            self.request_success.labels(*self._labels, reason)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt length in tokens.", lengths)
        self.request_generation_tokens = self._histogram("vllm:request_generation_tokens", "Output length in tokens.", lengths)
        self.request_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of requests.", lengths)
        self.request_n = self._histogram("vllm:request_params_n", "n of requests.", (1, 2, 5, 10, 20))
        self.iteration_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens per engine step.", STEP_TOKENS_BUCKETS)
        self.time_to_first_token = self._histogram("vllm:time_to_first_token_seconds", "Time to the first token.", TTFT_BUCKETS)
        self.inter_token_latency_family = Histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", LABELS, registry=registry, buckets=TOKEN_SECONDS_BUCKETS
        )
        self.inter_token_latency = self.inter_token_latency_family.labels(*self._labels)
        registry.register(
            Renamed(self.inter_token_latency_family, "vllm:time_per_output_token_seconds", "Time between tokens; the older name.")
        )
        self.request_latency = self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to end.", LATENCY_BUCKETS)
        self._growing = (
            self.generation_tokens,
            self.prefix_cache_queries,
            self.prefix_cache_hits,
            self.host_queries,
            self.host_hits,
            self.copied_out,
            self.copied_in,
            self.num_preemptions,
            self.class_preemptions,
            self.capacity_preemptions,
            self.swaps,
            self.swapped_blocks,
            self.swapped_tokens,
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.stale_outputs,
        )
        self._seen = (0,) * len(self._growing)

    def observe_turn(self, stats: EngineStats, *, step_tokens: Sequence[int], num_stale_outputs: int) -> None:
        """Takes over the engine's gauges and the growth of its counters. `step_tokens`: computed in each of the turn's steps."""
        self.num_requests_running.set(stats.num_running)
        self.num_requests_waiting.set(stats.num_waiting)
        self.kv_cache_usage.set(stats.num_used_blocks / stats.num_blocks)
        self.host_cache_usage.set(stats.num_held_host_blocks / max(1, stats.num_host_blocks))
        self.step_time_error.set(stats.step_time_error)
        for num_tokens in step_tokens:
            if num_tokens:
                self.iteration_tokens.observe(num_tokens)
        now = (
            stats.num_generated_tokens,
            stats.num_prefix_query_tokens,
            stats.num_prefix_hit_tokens,
            stats.num_host_query_tokens,
            stats.num_host_hit_tokens,
            stats.num_copied_out_blocks,
            stats.num_copied_in_blocks,
            stats.num_preemptions,
            stats.num_class_preemptions,
            stats.num_capacity_preemptions,
            stats.num_swaps,
            stats.num_swapped_blocks,
            stats.num_swapped_tokens,
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            num_stale_outputs,
        )
        for counter, value, seen in zip(self._growing, now, self._seen, strict=True):
            counter.inc(value - seen)
        self._seen = now

    def observe_end(self, reason: str, *, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request that ended; `reason` is one of FINISHED_REASONS."""
        self.request_success.labels(*self._labels, reason).inc()
        self.request_latency.observe(seconds)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_generation_tokens.observe(num_output_tokens)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self._registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, registry=self._registry, buckets=buckets).labels(*self._labels)


def one_two_five(maximum: int) -> list[float]:
    """1, 2, 5, 10, 20 ... up to `maximum`; at least [1]."""
    buckets = [float(mantissa * 10**exponent) for exponent in range(len(str(maximum))) for mantissa in (1, 2, 5)]
    return [bucket for bucket in buckets if bucket <= maximum] or [1.0]
