"""Which series the services export, from their own registries, and which ones an expression of PromQL names."""

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Metric

from services.common import metrics as common
from services.gateway.metrics import GatewayMetrics
from services.scheduler.metrics import Metrics as SchedulerMetrics
from services.scheduler.metrics import State
from services.worker import device_figures
from services.worker.engine.engine import EngineStats
from services.worker.metrics import WorkerMetrics
from services.worker.telemetry import Device, Telemetry
from services.worker.throughput import Throughput

OF_PROMETHEUS = frozenset({"up", "ALERTS"})
"""What Prometheus itself writes."""
_ENDINGS: dict[str, tuple[str, ...]] = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_ASIDE = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)')
_WORDS = frozenset({"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring", "group_left", "group_right"})


def exported() -> set[str]:
    """Names of all series of gateway, scheduler and worker, be it on a CPU or a GPU."""
    return {name for registry in _registries() for family in registry.collect() for name in _names(family)}


def named(expression: str) -> set[str]:
    """Names of the series that an expression reads."""
    bare = _ASIDE.sub(" ", expression)
    found = set()
    for match in _NAME.finditer(bare):
        is_function = bare[match.end() :].lstrip().startswith("(")
        is_number = match.start() > 0 and bare[match.start() - 1].isdigit()  # 1e3, 5m
        if not is_function and not is_number and match.group() not in _WORDS:
            found.add(match.group())
    return found


def _names(family: Metric) -> list[str]:
    return [family.name + ending for ending in _ENDINGS[family.type]]


def _registries() -> list[CollectorRegistry]:
    gateway, scheduler, worker = CollectorRegistry(), SchedulerMetrics(), CollectorRegistry()
    GatewayMetrics(gateway)
    scheduler.show(State(**{field.name: _nothing(field.name) for field in dataclasses.fields(State)}))
    throughput = Throughput(num_blocks=1, block_size=1, max_sequences=1)
    engines = WorkerMetrics(worker, {"": throughput}, max_model_len=1)
    engines.watch(lambda: {"": _stats()}, lambda: 0, _sensors(None))
    engines.describe_caches([{"block_size": 1, "num_gpu_blocks": 1}])
    for figure in device_figures.figures(_sensors(Device(0, "", ""))):
        worker.register(figure)
    common.add_process(gateway)
    common.LoopLag(gateway)
    return [gateway, scheduler.registry, worker]


def _nothing(name: str) -> Callable[[], Any]:
    return (lambda: 0) if name.startswith(("num_", "redis_", "policy_")) else (dict)


def _stats() -> EngineStats:
    values: dict[str, Any] = {field.name: 1 for field in dataclasses.fields(EngineStats)}
    return EngineStats(**values | {"num_spans_by_accepted": (0, 0), "step_time": (1.0,) * 4})


def _sensors(device: Device | None) -> Any:
    return SimpleNamespace(device=device, read=lambda: Telemetry(0, 0))
