"""Where models' weights are, in words and as columns: what workers tell of models that take turns on their devices."""

from collections.abc import Iterable

from rich.markup import escape

from forebay.v1 import admin_pb2, scheduler_pb2
from services.cli.output import NOTHING
from services.cli.table import Column

_WORDS = {
    scheduler_pb2.MODEL_PLACE_COLD: "not to be had",
    scheduler_pb2.MODEL_PLACE_HOST: "host",
    scheduler_pb2.MODEL_PLACE_LOADING: "loading",
    scheduler_pb2.MODEL_PLACE_DEVICE: "device",
}
_BUDGET = ("weights", "kv", "workspace", "reserve")


def place(state: scheduler_pb2.ModelState) -> str:
    """Such as "device, pinned" or "host, 1.2 s to load"."""
    words = [_WORDS.get(state.place, NOTHING)]
    if state.pinned:
        words.append("pinned")
    if state.place == scheduler_pb2.MODEL_PLACE_HOST and state.HasField("load_seconds"):
        words.append(f"{state.load_seconds:.2g} s to load")
    return ", ".join(words)


def by_model(workers: Iterable[admin_pb2.WorkerState]) -> dict[str, str]:
    """ "name@level" -> where it is, by worker."""
    places: dict[str, list[str]] = {}
    for worker in workers:
        for state in worker.heartbeat.models if worker.ready else ():
            places.setdefault(state.model, []).append(f"{worker.registration.worker_id}: {place(state)}")
    return {model: "; ".join(words) for model, words in places.items()}


def budget(worker: admin_pb2.WorkerState) -> str:
    """What the device's memory is for, in GiB by name; nothing where the worker was given no budget."""
    beat = worker.heartbeat
    if not beat.HasField("budget"):
        return ""
    return " ".join(f"{name} {getattr(beat.budget, f'{name}_bytes') / 2**30:.2f}" for name in _BUDGET) + " GiB"


def columns(workers: Iterable[admin_pb2.WorkerState]) -> list[Column]:
    """A row for each model that takes turns on a device; no column where there is none."""
    rows = [(worker, state) for worker in workers if worker.ready for state in worker.heartbeat.models if state.num_bytes]
    if not rows:
        return []
    return [
        Column("worker", [escape(worker.registration.worker_id) for worker, _ in rows]),
        Column("model", [escape(state.model) for _, state in rows]),
        Column("weights", [place(state) for _, state in rows]),
        Column("size", [f"{state.num_bytes / 2**20:,.0f} MiB" for _, state in rows], rank=2),
        Column("requests", [str(state.num_requests) for _, state in rows], rank=1),
        Column("blocks", [str(state.num_used_blocks) for _, state in rows], rank=3),
    ]
