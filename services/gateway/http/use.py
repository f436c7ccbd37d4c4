"""GET /v1/usage: what is asked of the ledger, and its rows as JSON."""

import re
from typing import Any

from fastapi import Request

from forebay.v1 import admin_pb2
from services.common.errors import invalid
from services.gateway.metrics import CLASS_NAMES

MAX_USAGE_DAYS = 90
MAX_USAGE_ROWS = 1000
_WHOLE = re.compile(r"[0-9]{1,4}")


def asked(request: Request) -> admin_pb2.GetUsageRequest:
    """From the query. INVALID_ARGUMENT names the field."""
    return admin_pb2.GetUsageRequest(
        org=request.query_params.get("org", ""),
        days=_whole(request, "days", 1, MAX_USAGE_DAYS),
        page_size=_whole(request, "page_size", MAX_USAGE_ROWS, MAX_USAGE_ROWS),
        page_token=request.query_params.get("page_token", ""),
    )


def page(used: admin_pb2.GetUsageResponse) -> dict[str, Any]:
    """A page of rows, and the token of the next one where there is one."""
    page = {"object": "list", "data": [_row(row) for row in used.rows]}
    return page | {"next_page_token": used.next_page_token} if used.next_page_token else page


def _whole(request: Request, name: str, default: int, most: int) -> int:
    """A query's whole number, 1 to `most`. Raises INVALID_ARGUMENT."""
    text = request.query_params.get(name, str(default))
    if not _WHOLE.fullmatch(text) or not 1 <= int(text) <= most:
        raise invalid(name, f"{name} is {text[:32]!a}: it must be a whole number, 1 to {most}")
    return int(text)


def _row(row: admin_pb2.UsageRow) -> dict[str, Any]:
    return {
        "object": "usage",
        "org": row.org,
        "day": row.day,
        "model": row.model,
        "class": CLASS_NAMES[row.latency_class],
        "requests": row.num_requests,
        "failed": row.num_failed,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "cached_tokens": row.cached_tokens,
    }
