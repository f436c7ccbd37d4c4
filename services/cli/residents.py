"""`forebay models`: what the mesh serves and where its weights are; and `load`, `unload`, `pin` and `unpin` of one."""

from typing import Annotated

import typer

from forebay.v1 import admin_pb2, scheduler_pb2
from services.cli import admin
from services.cli.options import text
from services.cli.output import as_dict, print_json
from services.cli.problem import Problem
from services.cli.ps import models as list_models

app = typer.Typer(name="models", rich_markup_mode=None)

Model = Annotated[str, typer.Argument(metavar="MODEL", parser=text("MODEL"), help="As `forebay models` names it, or NAME@LEVEL.")]
Worker = Annotated[
    str,
    typer.Option(
        "--worker", metavar="ID", parser=text("--worker"), help="A worker, or a node for all its workers; default: all that serve it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="The models as one JSON object.")] = False) -> None:
    """Lists what the mesh serves; its commands bring weights to devices, or drop them from there."""
    if context.invoked_subcommand is None:
        list_models(as_json)


@app.command()
def load(model: Model, worker: Worker = "", as_json: Json = False) -> None:
    """Brings a model's weights to the device now, before anybody asks for it."""
    _set(model, scheduler_pb2.MODEL_ACT_KIND_LOAD, worker, as_json)


@app.command()
def unload(model: Model, worker: Worker = "", as_json: Json = False) -> None:
    """Drops a model's weights from the device; the next request for it brings them back."""
    _set(model, scheduler_pb2.MODEL_ACT_KIND_UNLOAD, worker, as_json)


@app.command()
def pin(model: Model, worker: Worker = "", as_json: Json = False) -> None:
    """Keeps a model on the device, over restarts, too, until it is unpinned."""
    _set(model, scheduler_pb2.MODEL_ACT_KIND_PIN, worker, as_json)


@app.command()
def unpin(model: Model, worker: Worker = "", as_json: Json = False) -> None:
    """Lets a pinned model give way to others again."""
    _set(model, scheduler_pb2.MODEL_ACT_KIND_UNPIN, worker, as_json)


def _set(model: str, act: scheduler_pb2.ModelActKind.ValueType, worker: str, as_json: bool) -> None:
    request = admin_pb2.SetModelRequest(model=model, act=act, worker=worker)
    answer = admin.ask(lambda stub: stub.SetModel, request, admin_pb2.SetModelResponse)
    if as_json:
        print_json(as_dict(answer))
    else:
        for outcome in answer.outcomes:
            print(f"{outcome.worker_id}: {model} {outcome.words}")
        if not answer.outcomes:
            print(f"{model}: its pin is taken back; no worker serves it now")
    if refused := [outcome.worker_id for outcome in answer.outcomes if outcome.refused]:
        raise Problem(f"{', '.join(refused)} refused; the others did it")
