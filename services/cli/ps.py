"""`forebay ps` and `forebay models`: the fleet and its models, as tables or JSON."""

import asyncio
from collections.abc import Mapping
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.markup import escape

from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, scheduler_pb2
from services.cli import client, places
from services.cli.home import Home
from services.cli.output import NOTHING, as_dict, class_word, print_json
from services.cli.table import Column, print_table

_TIMEOUT_SECONDS = 10
_CURRENT_SECONDS = 3.0


def ps(as_json: Annotated[bool, typer.Option("--json", help="The fleet as one JSON object.")] = False) -> None:
    """Shows the workers and the queue.

    A narrow terminal gets fewer columns; a pipe or file gets all.
    """
    target = client.find()
    with client.friendly_errors(target):
        fleet = asyncio.run(_fleet(target))
    if as_json:
        print_json(as_dict(fleet) | _internal_addresses(target))
        return
    screen = Console()
    if fleet.workers:
        print_table(_worker_columns(list(fleet.workers)), screen)
    else:
        screen.print("no workers")
    if turns := places.columns(fleet.workers):
        print_table(turns, screen)
    notes = [f"{worker.registration.worker_id}: {worker.not_ready_reason}" for worker in fleet.workers if worker.not_ready_reason]
    notes += [
        f"queue {queue.model} {class_word(queue.latency_class)}: {queue.num_waiting} waiting, the oldest for {queue.oldest_seconds:.1f} s"
        for queue in fleet.queues
    ]
    for note in notes:
        screen.print(note, highlight=False, markup=False, soft_wrap=True)


def models(as_json: Annotated[bool, typer.Option("--json", help="The models as one JSON object.")] = False) -> None:
    """Lists what the mesh serves."""
    target = client.find()
    with client.friendly_errors(target):
        listed, fleet = asyncio.run(_models(target))
    where = places.by_model(fleet.workers)
    if as_json:
        print_json(as_dict(listed) | ({"places": where} if where else {}))
        return
    if listed.models:
        print_table(_model_columns(list(listed.models), where), Console())
    else:
        print("no models")


def _model_columns(listed: list[inference_pb2.Model], where: Mapping[str, str]) -> list[Column]:
    columns = [
        Column("model", [escape(model.name) for model in listed]),
        Column("aliases", [escape(", ".join(model.aliases)) for model in listed]),
        Column("state", [_colored("green", "ready") if model.ready else _colored("yellow", "no worker") for model in listed]),
        Column("where", [escape(where.get(f"{model.name}@{model.level}", "")) for model in listed], rank=1),
        Column("does", [", ".join(model.capabilities) for model in listed], rank=1),
        Column("weights", [model.level for model in listed], rank=1),
        Column("context", [str(model.max_model_len) for model in listed], rank=2),
        Column("vocabulary", [str(model.vocab_size) for model in listed], rank=4),
        Column("version", [model.version for model in listed], rank=3),
    ]
    return [column for column in columns if any(column.cells)]


def _worker_columns(workers: list[admin_pb2.WorkerState]) -> list[Column]:
    states = [_colored("green", "ready") if worker.ready else _colored("yellow", "not ready") for worker in workers]
    rows = [_numbers(worker) for worker in workers]
    # By what can best be done without: the batch and the cache are what one looks for.
    ranks = {"slots": 1, "waiting": 5, "blocks": 2, "cached": 7, "busy": 4, "tokens/s": 6, "memory": 3}
    return [
        Column("worker", [escape(worker.registration.worker_id) for worker in workers]),
        Column("state", states),
        Column("model", [escape(", ".join(model.model for model in worker.registration.models)) for worker in workers]),
        *(Column(title, [row[title] for row in rows], rank) for title, rank in ranks.items()),
        *([Column("budget", budgets, rank=8)] if any(budgets := [places.budget(worker) for worker in workers]) else []),
    ]


def _numbers(worker: admin_pb2.WorkerState) -> dict[str, str]:
    """Cells by title. The last numbers of a worker that is gone are no news: of such a one only the sizes are shown."""
    registration, beat = worker.registration, worker.heartbeat
    current = is_current(worker)
    num_blocks = cache_blocks(registration)
    return {
        "slots": f"{beat.num_running if current else NOTHING}/{registration.max_sequences}",
        "waiting": str(beat.num_waiting) if current else NOTHING,
        "blocks": f"{beat.num_used_blocks if current else NOTHING}/{num_blocks}",
        "cached": str(beat.num_cached_blocks) if current else NOTHING,
        "busy": f"{beat.utilization:.0%}" if current else NOTHING,
        "tokens/s": f"{beat.tokens_per_second:.0f}" if current else NOTHING,
        "memory": f"{beat.memory_used_bytes / 2**30:.1f}/{beat.memory_total_bytes / 2**30:.1f} GiB" if current else NOTHING,
    }


def cache_blocks(registration: scheduler_pb2.Register) -> int:
    """Of its models' caches. One that embeds has none, whatever it says for the scheduler's sums."""
    return sum(model.num_blocks for model in registration.models if not model.max_call_tokens)


def is_current(worker: admin_pb2.WorkerState) -> bool:
    """Whether its heartbeat tells of now: it takes work, or has just said itself why it doesn't."""
    said_why = worker.heartbeat.draining or not worker.heartbeat.healthy
    return worker.ready or (worker.HasField("heartbeat") and said_why and worker.heartbeat_age_seconds <= _CURRENT_SECONDS)


def _colored(color: str, words: str) -> str:
    return f"[{color}]{words}[/{color}]"


def _internal_addresses(target: client.Target) -> dict[str, object]:
    """Where /metrics is, by process, if it is the mesh that was started here; no other tells."""
    running = Home.from_environment().read()
    return {"internal_addresses": running.internal_addresses} if running and running.grpc_address == target.address else {}


async def _fleet(target: client.Target) -> admin_pb2.GetFleetResponse:
    async with target.channel() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return await stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=target.metadata, timeout=_TIMEOUT_SECONDS)


async def _models(target: client.Target) -> tuple[inference_pb2.ListModelsResponse, admin_pb2.GetFleetResponse]:
    """And the fleet, of which nobody but an operator is told."""
    async with target.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        listed = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=target.metadata, timeout=_TIMEOUT_SECONDS)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            return listed, await admin.GetFleet(admin_pb2.GetFleetRequest(), metadata=target.metadata, timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return listed, admin_pb2.GetFleetResponse()
