"""`forebay keys`: the development token, and the API keys of a mesh."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from forebay.v1 import admin_pb2
from services.cli import admin
from services.cli import keys as identity
from services.cli.home import Home
from services.cli.options import span, text
from services.cli.output import NOTHING, as_dict, print_json, when
from services.cli.table import Column, print_table

Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Org = Annotated[str, typer.Option("--org", parser=text("--org"), metavar="ORG", help="Of this org alone.")]


class _Keys(TyperGroup):
    """Takes a folder, told by its '/', for the command that prints the token kept there."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, ["token", *args] if "/" in args[0] else args)


app = typer.Typer(name="keys", cls=_Keys, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def keys(context: typer.Context) -> None:
    """Prints a development token; makes, lists and revokes API keys.

    The token's key and the JWKS file for gateways are where `forebay up` keeps them; `forebay keys ./FOLDER` makes others there.
    """
    if context.invoked_subcommand is None:
        token(Home.from_environment().keys)


@app.command(hidden=True)
def token(folder: Annotated[Path, typer.Argument(metavar="FOLDER")]) -> None:
    """Prints the development token of FOLDER, made there where there is none."""
    print(identity.ensure(folder).token)


@app.command()
def create(
    org: Annotated[str, typer.Option("--org", parser=text("--org"), metavar="ORG", help="Whom it speaks for.")],
    name: Annotated[str, typer.Option("--name", parser=text("--name"), metavar="NAME", help="For people: what uses it, say.")],
    as_operator: Annotated[bool, typer.Option("--operator", help="It may also see and set what operators may.")] = False,
    expires: Annotated[
        float | None, typer.Option("--expires", parser=span("--expires"), metavar="SPAN", help="After 30d, or 12h; left out: never.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Makes an API key and prints it, this once: only a hash of it is kept."""
    roles = ["user", "operator"] if as_operator else ["user"]
    request = admin_pb2.CreateKeyRequest(org=org, name=name, roles=roles, lifetime_seconds=expires or 0.0)
    made = admin.ask(lambda stub: stub.CreateKey, request, admin_pb2.CreateKeyResponse)
    if as_json:
        print_json(as_dict(made))
        return
    print(made.key, flush=True)
    lasts = f"until {when(made.info.expires_at)} UTC" if made.info.expires_at else "until it is revoked"
    print(f"key {made.info.key_id} of {made.info.org}, {lasts}; it is not shown again", file=sys.stderr)


@app.command("list")
def list_keys(org: Org = "", as_json: Json = False) -> None:
    """Lists API keys, without what they consist of."""
    listed = admin.ask(lambda stub: stub.ListKeys, admin_pb2.ListKeysRequest(org=org), admin_pb2.ListKeysResponse)
    if as_json:
        print_json(as_dict(listed))
    elif listed.keys:
        print_table(_columns(list(listed.keys)), Console())
    else:
        print("no API keys")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", parser=text("ID"), help="As `forebay keys list` shows it.")], as_json: Json = False
) -> None:
    """Makes an API key worthless, everywhere within seconds."""
    answer = admin.ask(lambda stub: stub.RevokeKey, admin_pb2.RevokeKeyRequest(key_id=key_id), admin_pb2.RevokeKeyResponse)
    if as_json:
        print_json(as_dict(answer))
    else:
        print(f"key {key_id} is revoked")


def _columns(listed: list[admin_pb2.ApiKey]) -> list[Column]:
    return [
        Column("id", [escape(key.key_id) for key in listed]),
        Column("org", [escape(key.org) for key in listed]),
        Column("name", [escape(key.name) for key in listed], rank=1),
        Column("roles", [", ".join(key.roles) or NOTHING for key in listed], rank=2),
        Column("created", [when(key.created_at) for key in listed], rank=4),
        Column("expires", [when(key.expires_at) for key in listed], rank=3),
    ]
