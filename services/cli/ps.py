"""`forebay ps` and `forebay models`: the fleet and its models, as tables or JSON."""

import asyncio
import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.cli import client

_TIMEOUT_SECONDS = 10


def ps(as_json: Annotated[bool, typer.Option("--json", help="The fleet as one JSON object.")] = False) -> None:
    """Shows workers with their state, slots, blocks and memory, and the queue."""
    target = client.find()
    with client.friendly_errors(target):
        fleet = asyncio.run(_fleet(target))
    if as_json:
        _print_json(fleet)
        return
    screen = Console()
    table = Table(
        "worker", "state", "model", "running", "waiting", "blocks", "cached", "busy", "tokens/s", "memory", box=None, pad_edge=False
    )
    for worker in fleet.workers:
        table.add_row(*_worker_row(worker))
    screen.print(table if fleet.workers else "no workers")
    for queue in fleet.queues:
        name = types_pb2.LatencyClass.Name(queue.latency_class).removeprefix("LATENCY_CLASS_").lower()
        screen.print(
            f"queue {queue.model} {name}: {queue.num_waiting} waiting, the oldest for {queue.oldest_seconds:.1f} s", highlight=False
        )


def models(as_json: Annotated[bool, typer.Option("--json", help="The models as one JSON object.")] = False) -> None:
    """Lists the models that the mesh serves."""
    target = client.find()
    with client.friendly_errors(target):
        listed = asyncio.run(_models(target))
    if as_json:
        _print_json(listed)
        return
    table = Table("model", "aliases", "state", "weights", "context", "vocabulary", "version", box=None, pad_edge=False)
    for model in listed.models:
        state = "[green]ready[/green]" if model.ready else "[yellow]no worker[/yellow]"
        table.add_row(
            model.name, ", ".join(model.aliases), state, model.level, str(model.max_model_len), str(model.vocab_size), model.version
        )
    Console().print(table)


def _worker_row(worker: admin_pb2.WorkerState) -> tuple[str, ...]:
    registration, beat = worker.registration, worker.heartbeat
    state = "[green]ready[/green]" if worker.ready else f"[yellow]{worker.not_ready_reason or 'not ready'}[/yellow]"
    num_blocks = sum(model.num_blocks for model in registration.models)
    return (
        registration.worker_id,
        state,
        ", ".join(model.model for model in registration.models),
        f"{beat.num_running}/{registration.max_sequences}",
        str(beat.num_waiting),
        f"{beat.num_used_blocks}/{num_blocks}",
        str(beat.num_cached_blocks),
        f"{beat.utilization:.0%}",
        f"{beat.tokens_per_second:.0f}",
        f"{beat.memory_used_bytes / 2**30:.1f}/{beat.memory_total_bytes / 2**30:.1f} GiB",
    )


async def _fleet(target: client.Target) -> admin_pb2.GetFleetResponse:
    async with target.channel() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return await stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=target.metadata, timeout=_TIMEOUT_SECONDS)


async def _models(target: client.Target) -> inference_pb2.ListModelsResponse:
    async with target.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=target.metadata, timeout=_TIMEOUT_SECONDS)


def _print_json(message: Message) -> None:
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(fields, ensure_ascii=False))
