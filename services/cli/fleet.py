"""`forebay queue` and `forebay workers`: who waits and for how long; how full, how busy and how warm each worker is, as bars."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from forebay.v1 import admin_pb2
from services.cli import admin
from services.cli.output import NOTHING, as_dict, class_word, print_json
from services.cli.ps import cache_blocks, is_current
from services.cli.table import Column, print_table

_BAR_WIDTH = 10

Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def queue(as_json: Json = False) -> None:
    """Shows how many requests wait, by model and class, and for how long the oldest has."""
    fleet = ask_fleet()
    if as_json:
        print_json({"queues": [as_dict(line) for line in fleet.queues]})
    elif fleet.queues:
        print_table(queue_columns(list(fleet.queues)), Console())
    else:
        print("nobody waits")


def workers(as_json: Json = False) -> None:
    """Shows how full, busy and warm each worker is. `forebay ps` has the bare numbers."""
    fleet = ask_fleet()
    if as_json:
        print_json({"workers": [as_dict(worker) for worker in fleet.workers]})
    elif fleet.workers:
        print_table(worker_columns(list(fleet.workers)), Console())
    else:
        print("no workers")


def ask_fleet() -> admin_pb2.GetFleetResponse:
    """The fleet as a scheduler sees it now; Problem where it can't be had."""
    return admin.ask(lambda stub: stub.GetFleet, admin_pb2.GetFleetRequest(), admin_pb2.GetFleetResponse)


def queue_columns(lines: list[admin_pb2.QueueDepth]) -> list[Column]:
    """A row per model and class."""
    return [
        Column("model", [escape(line.model) for line in lines]),
        Column("class", [class_word(line.latency_class) for line in lines]),
        Column("waiting", [f"{line.num_waiting:,}" for line in lines]),
        Column("oldest", [f"{line.oldest_seconds:.1f} s" for line in lines]),
    ]


def worker_columns(listed: list[admin_pb2.WorkerState]) -> list[Column]:
    """Of a worker that is gone nothing is known: its last numbers are no news."""
    rows = [_cells(worker) if is_current(worker) else {} for worker in listed]
    ranks = {"cache": 0, "batch": 0, "busy": 2, "memory": 1, "tokens/s": 3, "temperature": 4, "power": 5}
    return [
        Column("worker", [escape(worker.registration.worker_id) for worker in listed]),
        *(Column(title, [row.get(title, NOTHING) for row in rows], rank) for title, rank in ranks.items()),
    ]


def _cells(worker: admin_pb2.WorkerState) -> dict[str, str]:
    beat = worker.heartbeat
    cells = {
        "cache": _bar(beat.num_used_blocks, cache_blocks(worker.registration)),
        "batch": _bar(beat.num_running, worker.registration.max_sequences),
        "busy": _bar(beat.utilization, 1.0),
        "memory": _bar(beat.memory_used_bytes, beat.memory_total_bytes),
        "tokens/s": f"{beat.tokens_per_second:.0f}",
    }
    if beat.HasField("temperature_celsius"):
        cells["temperature"] = f"{beat.temperature_celsius:.0f} °C"
    if beat.HasField("power_watts"):
        cells["power"] = f"{beat.power_watts:.0f} W"
    return cells


def _bar(part: float, whole: float) -> str:
    share = min(1.0, part / whole) if whole else 0.0
    full = round(share * _BAR_WIDTH)
    return "█" * full + "░" * (_BAR_WIDTH - full) + f" {share:4.0%}"
