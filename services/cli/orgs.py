"""`forebay orgs`: what orgs were promised, and overrides of it."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from forebay.v1 import admin_pb2, types_pb2
from services.cli import admin
from services.cli.options import shown, text
from services.cli.output import NOTHING, as_dict, class_word, limit, print_json
from services.cli.problem import Usage
from services.cli.table import Column, print_table
from services.policy.document import Node, PolicyError, Scalar, Sequence
from services.policy.fields import name
from services.policy.policy import LIMIT_READERS

_READERS = {"tier": name, **LIMIT_READERS}
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Org = Annotated[str, typer.Argument(metavar="ORG", parser=text("ORG"), help="The org.")]

app = typer.Typer(name="orgs", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def orgs(context: typer.Context, as_json: Json = False) -> None:
    """Shows what orgs were promised; sets and resets overrides."""
    if context.invoked_subcommand is None:
        list_orgs(as_json)


@app.command("list")
def list_orgs(as_json: Json = False) -> None:
    """Lists the orgs that the policy file or an operator names; `*` is any other."""
    listed = admin.ask(lambda stub: stub.ListOrgs, admin_pb2.ListOrgsRequest(), admin_pb2.ListOrgsResponse)
    if as_json:
        print_json(as_dict(listed))
    else:
        print_table(_columns(list(listed.orgs), set(listed.overridden)), Console())


@app.command("set")
def set_org(
    org: Org,
    settings: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE", parser=text("FIELD=VALUE"), help="tokens_per_minute=60000, ceiling_class=batch.")
    ],
    as_json: Json = False,
) -> None:
    """Overrides fields of an org's policy, over the policy file and its reloads."""
    policy, fields = types_pb2.OrgPolicy(org=org), [_take(setting) for setting in settings]
    for field, value in fields:
        if isinstance(value, tuple):
            policy.models[:] = value
        else:
            setattr(policy, field, value)
    request = admin_pb2.SetOrgRequest(policy=policy, fields=[field for field, _ in fields])
    _show(admin.ask(lambda stub: stub.SetOrg, request, admin_pb2.SetOrgResponse), as_json)


@app.command("reset")
def reset_org(org: Org, as_json: Json = False) -> None:
    """Takes an org's overrides back: the policy file holds again."""
    _show(admin.ask(lambda stub: stub.ResetOrg, admin_pb2.ResetOrgRequest(org=org), admin_pb2.ResetOrgResponse), as_json)


def _take(setting: str) -> tuple[str, object]:
    """A field and its value, read as the policy file's would be. Usage names what is wrong with which."""
    field, separator, value = setting.partition("=")
    if not separator:
        raise Usage(f"{shown(setting)} sets nothing: write FIELD=VALUE, such as tokens_per_minute=60000")
    if field not in _READERS:
        raise Usage(f"{shown(field)} is no field of an org; there are: {', '.join(_READERS)}")
    node: Node = Scalar(1, value)
    if field == "models":
        node = Sequence(1, [Scalar(1, part) for part in value.split(",") if part])
    try:
        return field, _READERS[field](node, field)
    except PolicyError as error:
        raise Usage(error.message) from None


def _show(answer: admin_pb2.SetOrgResponse | admin_pb2.ResetOrgResponse, as_json: bool) -> None:
    if as_json:
        print_json(as_dict(answer))
    else:
        print_table(_columns([answer.policy], set()), Console())


def _columns(orgs: list[types_pb2.OrgPolicy], overridden: set[str]) -> list[Column]:
    columns = [
        Column("org", [escape(org.org) for org in orgs]),
        Column("tier", [escape(org.tier) or NOTHING for org in orgs], rank=4),
        Column("requests/min", [limit(org.requests_per_minute) for org in orgs], rank=1),
        Column("tokens/min", [limit(org.tokens_per_minute) for org in orgs], rank=1),
        Column("bursts", [f"{limit(org.requests_burst)}/{limit(org.tokens_burst)}" for org in orgs], rank=7),
        Column("class", [class_word(org.default_class) for org in orgs], rank=3),
        Column("ceiling", [class_word(org.ceiling_class) for org in orgs], rank=2),
        Column("at once", [limit(org.max_concurrent) for org in orgs], rank=5),
        Column("KV share", [f"{org.kv_share:g}" for org in orgs], rank=8),
        Column("weight", [f"{org.weight:g}" for org in orgs], rank=9),
        Column("models", [escape(", ".join(org.models)) or "all" for org in orgs], rank=6),
    ]
    if overridden:
        columns.append(Column("set by", ["operator" if org.org in overridden else "file" for org in orgs], rank=10))
    return columns
