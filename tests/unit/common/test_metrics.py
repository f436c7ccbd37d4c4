"""Figures that others keep, exemplars, and what a process says of itself."""

import asyncio

import httpx
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.common import metrics, process

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_figure_is_read_when_it_is_asked_for_and_what_is_gone_has_no_series() -> None:
    registry, depths = CollectorRegistry(), {"a": 1.0, "b": 2.0}
    registry.register(metrics.Figure("depth", "Depth.", lambda: [((name,), depth) for name, depth in depths.items()], ("name",)))
    assert registry.get_sample_value("depth", {"name": "b"}) == 2
    del depths["b"]
    assert registry.get_sample_value("depth", {"name": "b"}) is None
    assert registry.get_sample_value("depth", {"name": "a"}) == 1


def test_a_counter_of_others_is_a_counter() -> None:
    registry = CollectorRegistry()
    registry.register(metrics.counter("failures", "Failures.", lambda: 3))
    registry.register(metrics.gauge("away", "Away.", lambda: True))
    assert registry.get_sample_value("failures_total") == 3
    assert registry.get_sample_value("away") == 1
    assert {family.name: family.type for family in registry.collect()} == {"failures": "counter", "away": "gauge"}


def test_an_exemplar_is_nothing_without_a_trace() -> None:
    assert metrics.exemplar(None) is None
    assert metrics.exemplar("") is None
    assert metrics.exemplar("ab") == {"trace_id": "ab"}


def test_exemplars_are_shown_where_openmetrics_is_asked_for() -> None:
    registry = CollectorRegistry()
    seconds = Histogram("wait_seconds", "Wait.", registry=registry, buckets=(1, 2))
    seconds.observe(1.5, metrics.exemplar("ab"))
    body, content_type = metrics.exposition(registry, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    (family,) = text_string_to_metric_families(body.decode())
    assert [sample.exemplar.labels for sample in family.samples if sample.exemplar] == [{"trace_id": "ab"}]
    body, content_type = metrics.exposition(registry, "*/*")
    assert content_type.startswith("text/plain")
    assert b"trace_id" not in body


async def test_the_internal_port_tells_of_its_process() -> None:
    internal = process.InternalHttp("127.0.0.1:0", CollectorRegistry(), lambda: None)
    port = await internal.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            lines = (await client.get("/metrics")).text.splitlines()
    finally:
        await internal.stop()
    names = {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")}
    assert names >= {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"}
    assert "forebay_event_loop_lag_seconds_count" in names
    assert any(line.startswith('forebay_build_info{version="') for line in lines)
    assert not any(name.endswith("_created") for name in names)


async def test_a_loop_that_was_held_up_shows_it() -> None:
    registry = CollectorRegistry()
    lag = metrics.LoopLag(registry)
    loop = asyncio.get_running_loop()
    lag._tick(loop, loop.time() - 0.3)
    lag.stop()
    assert registry.get_sample_value("forebay_event_loop_lag_seconds_bucket", {"le": "0.25"}) == 0
    assert registry.get_sample_value("forebay_event_loop_lag_seconds_count") == 1
