"""The worker's series are vLLM's: names, types, labels and buckets, as its v1 engine exports them (0.32)."""

import time
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.common.metrics import exposition
from services.worker.engine.step_time import Load
from services.worker.metrics import Ended, Metrics, WorkerMetrics, one_two_five
from services.worker.telemetry import Sensors
from services.worker.throughput import Throughput
from tests.spans import recorded
from tests.worker_harness import ToyRunner, hear, serving, toy

MAX_MODEL_LEN = 300
SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200)  # up to the context length
ENGINE = ("engine", "model_name")

# name: (type, labels beside model_name and engine, buckets)
VLLM: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "vllm:num_requests_running": ("gauge", (), ()),
    "vllm:num_requests_waiting": ("gauge", (), ()),
    "vllm:num_requests_waiting_by_reason": ("gauge", ("reason",), ()),
    "vllm:kv_cache_usage_perc": ("gauge", (), ()),
    "vllm:gpu_cache_usage_perc": ("gauge", (), ()),  # until 0.10
    "vllm:prefix_cache_queries": ("counter", (), ()),
    "vllm:prefix_cache_hits": ("counter", (), ()),
    "vllm:external_prefix_cache_queries": ("counter", (), ()),
    "vllm:external_prefix_cache_hits": ("counter", (), ()),
    "vllm:num_preemptions": ("counter", (), ()),
    "vllm:prompt_tokens": ("counter", (), ()),
    "vllm:prompt_tokens_by_source": ("counter", ("source",), ()),
    "vllm:prompt_tokens_cached": ("counter", (), ()),
    "vllm:prompt_tokens_cached_by_source": ("counter", ("source",), ()),
    "vllm:generation_tokens": ("counter", (), ()),
    "vllm:request_success": ("counter", ("finished_reason",), ()),
    "vllm:spec_decode_num_drafts": ("counter", (), ()),
    "vllm:spec_decode_num_draft_tokens": ("counter", (), ()),
    "vllm:spec_decode_num_accepted_tokens": ("counter", (), ()),
    "vllm:request_prompt_tokens": ("histogram", (), TOKENS),
    "vllm:request_generation_tokens": ("histogram", (), TOKENS),
    "vllm:request_max_num_generation_tokens": ("histogram", (), TOKENS),
    "vllm:request_params_max_tokens": ("histogram", (), TOKENS),
    "vllm:request_prefill_kv_computed_tokens": ("histogram", (), TOKENS),
    "vllm:request_params_n": ("histogram", (), (1, 2, 5, 10, 20)),
    "vllm:request_num_preemptions": ("histogram", (), (1, 2, 3, 4, 5, 10, 20)),
    "vllm:iteration_tokens_total": ("histogram", (), STEP),
    "vllm:time_to_first_token_seconds": ("histogram", (), TTFT),
    "vllm:inter_token_latency_seconds": ("histogram", (), ITL),
    "vllm:time_per_output_token_seconds": ("histogram", (), ITL),  # until 0.12
    "vllm:request_time_per_output_token_seconds": ("histogram", (), ITL),
    "vllm:e2e_request_latency_seconds": ("histogram", (), SECONDS),
    "vllm:request_queue_time_seconds": ("histogram", (), SECONDS),
    "vllm:request_inference_time_seconds": ("histogram", (), SECONDS),
    "vllm:request_prefill_time_seconds": ("histogram", (), SECONDS),
    "vllm:request_decode_time_seconds": ("histogram", (), SECONDS),
}
PARTS = ("bucket", "sum", "count")
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
INFO = {
    "vllm:cache_config_info": {
        "block_size", "cache_dtype", "enable_prefix_caching", "engine", "kv_cache_size_tokens", "num_cpu_blocks", "num_gpu_blocks",
    },
    "vllm:lora_requests_info": {"max_lora", "waiting_lora_adapters", "running_lora_adapters"},
}  # fmt: skip
VALUES = {
    ("vllm:request_success", "finished_reason"): {"stop", "length", "abort", "error", "repetition"},
    ("vllm:prompt_tokens_by_source", "source"): {"local_compute", "local_cache_hit", "external_kv_transfer"},
    ("vllm:prompt_tokens_cached_by_source", "source"): {"device", "host"},
    ("vllm:num_requests_waiting_by_reason", "reason"): {"capacity", "deferred"},
}


READ_BY_OTHERS = {
    # vLLM's own Grafana dashboard, of now and of before 0.10
    *(f"vllm:{name}_seconds_{part}" for name in ("e2e_request_latency", "time_to_first_token", "time_per_output_token") for part in PARTS),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_requests_running"),
    *("vllm:gpu_cache_usage_perc", "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    "vllm:request_max_num_generation_tokens_sum",
    # the Gateway API inference extension, and KEDA's trigger
    *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    *("vllm:lora_requests_info", "vllm:cache_config_info"),
}


def made() -> tuple[CollectorRegistry, Metrics]:
    registry = CollectorRegistry()
    throughput = Throughput(num_blocks=4, block_size=4, max_sequences=2)
    metrics = WorkerMetrics(registry, {"toy@fp32": throughput}, max_model_len=MAX_MODEL_LEN)
    engine, _ = toy(ToyRunner())
    metrics.watch(lambda: {"toy@fp32": engine.stats()}, lambda: 0, Sensors("cpu"))
    return registry, metrics.models["toy@fp32"]


def families(registry: CollectorRegistry) -> dict[str, Metric]:
    return {family.name: family for family in registry.collect()}


def labels_of(family: Metric) -> set[str]:
    return {name for sample in family.samples for name in sample.labels} - {"le"}


def bounds_of(family: Metric) -> tuple[float, ...]:
    bounds = (float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket"))
    return tuple(bound for bound in bounds if bound != float("inf"))


def names(found: Iterable[str]) -> set[str]:
    return {name for name in found if name.startswith("vllm:")}


def test_every_series_is_vllms() -> None:
    registry, _ = made()
    found = families(registry)
    assert names(found) == {*VLLM, PER_POSITION}
    for name, (kind, extra, buckets) in VLLM.items():
        assert found[name].type == kind, name
        assert labels_of(found[name]) == {*ENGINE, *extra}, name
        assert bounds_of(found[name]) == buckets, name
        assert all(sample.labels["model_name"] == "toy@fp32" and sample.labels["engine"] == "0" for sample in found[name].samples), name


@pytest.mark.parametrize(("series", "values"), VALUES.items())
def test_labels_have_vllms_values(series: tuple[str, str], values: set[str]) -> None:
    registry, _ = made()
    name, label = series
    assert {sample.labels[label] for sample in families(registry)[name].samples} == values


async def test_what_balancers_read_of_the_cache_is_there() -> None:
    async with serving() as worker:
        text = (await worker.http.get("/metrics", headers={"accept": "application/openmetrics-text"})).text
        found = {family.name: family for family in text_string_to_metric_families(text)}
        for name, labels in INFO.items():
            assert labels_of(found[name]) == labels
        (cache,) = found["vllm:cache_config_info"].samples
        assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"], cache.value) == ("4", "64", 1)


async def test_what_dashboards_balancers_and_autoscalers_of_vllm_read_is_there() -> None:
    async with serving() as worker:
        await hear(worker.stub.Generate(worker.request()))
        text = (await worker.http.get("/metrics")).text
    found = {line.partition("{")[0] for line in text.splitlines() if line.startswith("vllm:")}
    assert found >= READ_BY_OTHERS, READ_BY_OTHERS - found


async def test_a_sampled_call_is_the_exemplar_of_its_latencies() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with recorded():
        async with serving() as worker:
            for request_id, flags in (("r1", "00"), ("r2", "01")):
                metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-{flags}"),)
                await hear(worker.stub.Generate(worker.request(request_id), metadata=metadata))
                text = (await worker.http.get("/metrics", headers={"accept": "application/openmetrics-text"})).text
                assert (f'trace_id="{trace}"' in text) is (flags == "01")


def test_a_latency_leads_to_its_trace_where_there_is_one() -> None:
    registry, metrics = made()
    metrics.observe_first_token(0.05)
    assert "# {" not in exposition(registry, "application/openmetrics-text")[0].decode()
    metrics.observe_first_token(0.05, "4bf92f3577b34da6a3ce929d0e0e4736")
    metrics.observe_end(Ended("stop", 1.0, 3.0, 1, 4, 2, 2, trace_id="4bf92f3577b34da6a3ce929d0e0e4736"))
    lines = [line for line in exposition(registry, "application/openmetrics-text")[0].decode().splitlines() if "# {" in line]
    assert {line.partition("_bucket")[0] for line in lines} == {"vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"}
    assert all('{trace_id="4bf92f3577b34da6a3ce929d0e0e4736"}' in line for line in lines)
    assert "# {" not in exposition(registry, "text/plain")[0].decode()


def test_a_request_that_never_ran_has_no_times() -> None:
    registry, metrics = made()
    metrics.observe_end(Ended("abort", 1.0, 3.0, 1, 4, 0, 0))
    assert registry.get_sample_value("vllm:e2e_request_latency_seconds_sum", {"model_name": "toy@fp32", "engine": "0"}) == 2
    assert registry.get_sample_value("vllm:request_queue_time_seconds_count", {"model_name": "toy@fp32", "engine": "0"}) == 0


def test_buckets_of_lengths_go_up_to_the_context() -> None:
    assert one_two_five(200) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert one_two_five(1) == [1]
    assert isinstance(Histogram("lengths", "Lengths.", registry=None, buckets=one_two_five(9000)), Histogram)


def test_models_of_one_device_have_series_of_their_own_in_shared_families() -> None:
    registry = CollectorRegistry()
    throughputs = {name: Throughput(num_blocks=4, block_size=4, max_sequences=2) for name in ("a@fp32", "b@fp32")}
    metrics = WorkerMetrics(registry, throughputs, max_model_len=MAX_MODEL_LEN)
    engines = {name: toy(ToyRunner())[0] for name in throughputs}
    metrics.watch(lambda: {name: engine.stats() for name, engine in engines.items()}, lambda: 0, Sensors("cpu"))
    metrics.models["b@fp32"].observe_first_token(0.05)
    metrics.tell_healthy(True)

    def value(name: str, model: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": model, "engine": "0"})

    assert [value("vllm:time_to_first_token_seconds_count", model) for model in throughputs] == [0, 1]
    assert [value("vllm:num_requests_running", model) for model in throughputs] == [0, 0]
    assert [value("forebay_worker_step_loop_healthy", model) for model in throughputs] == [1, 1]


def test_a_fitted_step_time_is_there_once_it_is_known() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, {"a": Throughput(num_blocks=4, block_size=4, max_sequences=2)}, max_model_len=MAX_MODEL_LEN)
    engine = toy(ToyRunner())[0]
    metrics.watch(lambda: {"a": engine.stats()}, lambda: 0, Sensors("cpu"))

    def parts() -> list[float | None]:
        labels = {"model_name": "a", "engine": "0"}
        names = ("step", "token", "row", "key")
        return [registry.get_sample_value("forebay_worker_step_time_seconds", {**labels, "per": per}) for per in names]

    assert parts() == [None] * 4
    for num_tokens in (1, 2, 3, 4) * 8:
        engine.batcher.step_time.record(Load(num_tokens, 1, 0), 0.5 + 0.25 * num_tokens)
    assert parts() == pytest.approx([0.5, 0.25, 0, 0], abs=0.02)


def test_what_models_ask_of_a_shared_device_adds_up() -> None:
    registry = CollectorRegistry()
    throughputs = {model: Throughput(num_blocks=8, block_size=16, max_sequences=4) for model in ("a", "b", "resting")}
    WorkerMetrics(registry, throughputs, max_model_len=MAX_MODEL_LEN)
    assert registry.get_sample_value("forebay_worker_sharing_load") is None
    now = time.monotonic()
    for model in ("a", "b"):
        throughputs[model].record_steps(now, num_steps=10, seconds=0.5)
        throughputs[model].record_end(now, n=1, num_prompt_tokens=8, num_output_tokens=8)
    shares = [throughputs[model].share(now) for model in ("a", "b")]
    load = registry.get_sample_value("forebay_worker_sharing_load")
    assert load is not None
    assert load == pytest.approx(sum(share for share in shares if share is not None), rel=0.2)
    assert load > 0
