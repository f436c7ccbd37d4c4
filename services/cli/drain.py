"""`forebay drain` and `undrain`: workers out of service and back, without a request that fails."""

from typing import Annotated

import typer

from forebay.v1 import admin_pb2
from services.cli import admin
from services.cli.options import text
from services.cli.output import as_dict, print_json

Name = Annotated[
    str, typer.Argument(metavar="NODE", parser=text("NODE"), help="A worker, or a node for all its workers, as `forebay ps` names them.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def drain(name: Name, as_json: Json = False) -> None:
    """Takes a worker or a node out of service: what runs there ends, or moves after a while."""
    _set(admin_pb2.DrainRequest(name=name), "takes no new work any more; `forebay workers` shows when it is empty", as_json)


def undrain(name: Name, as_json: Json = False) -> None:
    """Puts a worker or a node back into service."""
    _set(admin_pb2.DrainRequest(name=name, undrain=True), "takes work again", as_json)


def _set(request: admin_pb2.DrainRequest, words: str, as_json: bool) -> None:
    answer = admin.ask(lambda stub: stub.Drain, request, admin_pb2.DrainResponse)
    if as_json:
        print_json(as_dict(answer))
    else:
        print(f"{', '.join(answer.worker_ids) or request.name} {words}")
