"""`forebay usage` and `forebay audit`: what orgs have used, and what operators have done."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from forebay.v1 import admin_pb2
from services.cli import admin
from services.cli.options import text, whole
from services.cli.output import as_dict, class_word, print_json, when
from services.cli.problem import Problem
from services.cli.table import Column, print_table

_MAX_PAGES = 500
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def usage(
    days: Annotated[
        int, typer.Option("--days", parser=whole("--days", 1, 90), metavar="N", help="So many days (UTC), today among them.")
    ] = 1,
    org: Annotated[
        str, typer.Option("--org", parser=text("--org"), metavar="ORG", help="Of this org; left out: all for operators, else one's own.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Shows what orgs have used, by day, model and class."""
    used = _all_pages(admin_pb2.GetUsageRequest(org=org, days=days))
    if as_json:
        print_json(as_dict(used))
    elif used.rows:
        print_table(_usage_columns(list(used.rows)), Console())
    else:
        print("no use")


def audit(
    limit: Annotated[int, typer.Option("--limit", parser=whole("--limit", 1, 1000), metavar="N", help="At most so many acts.")] = 100,
    as_json: Json = False,
) -> None:
    """Shows the latest acts of operators, newest first."""
    listed = admin.ask(lambda stub: stub.ListAudit, admin_pb2.ListAuditRequest(limit=limit), admin_pb2.ListAuditResponse)
    if as_json:
        print_json(as_dict(listed))
    elif listed.entries:
        print_table(_audit_columns(list(listed.entries)), Console())
    else:
        print("no acts")


def _all_pages(request: admin_pb2.GetUsageRequest) -> admin_pb2.GetUsageResponse:
    used = admin_pb2.GetUsageResponse()
    for _ in range(_MAX_PAGES):
        page = admin.ask(lambda stub: stub.GetUsage, request, admin_pb2.GetUsageResponse)
        used.rows.extend(page.rows)
        request.page_token = page.next_page_token
        if not request.page_token:
            return used
    raise Problem(f"more than {len(used.rows):,} rows: ask for fewer --days, or one --org")


def _usage_columns(rows: list[admin_pb2.UsageRow]) -> list[Column]:
    return [
        Column("day", [row.day for row in rows], rank=2),
        Column("org", [escape(row.org) for row in rows]),
        Column("model", [escape(row.model) for row in rows], rank=1),
        Column("class", [class_word(row.latency_class) for row in rows], rank=3),
        Column("requests", [f"{row.num_requests:,}" for row in rows]),
        Column("failed", [f"{row.num_failed:,}" for row in rows], rank=4),
        Column("prompt", [f"{row.prompt_tokens:,}" for row in rows]),
        Column("cached", [f"{row.cached_tokens:,}" for row in rows], rank=5),
        Column("output", [f"{row.completion_tokens:,}" for row in rows]),
    ]


def _audit_columns(entries: list[admin_pb2.AuditEntry]) -> list[Column]:
    return [
        Column("at", [when(entry.at) for entry in entries]),
        Column("actor", [escape(entry.actor) for entry in entries]),
        Column("act", [escape(entry.act) for entry in entries]),
        Column("target", [escape(entry.target) for entry in entries], rank=1),
        Column("details", [escape(entry.details) for entry in entries], rank=3),
        Column("outcome", [escape(entry.outcome) for entry in entries], rank=2),
    ]
