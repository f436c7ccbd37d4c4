"""What a request says beside its body: class, deadline, and whole numbers of its query; and what its answer says of its class."""

import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from services.common.errors import invalid
from services.gateway.latency import UNSPECIFIED, LatencyClass, latency_class
from services.gateway.metrics import CLASS_NAMES
from services.gateway.request import Admitted

MAX_DEADLINE_SECONDS = 86_400.0
_WHOLE = re.compile(r"[0-9]{1,4}")


def asked_class(request: Request, body: Mapping[str, Any]) -> LatencyClass:
    """x-forebay-class, or service_tier. Where both say something, they must say the same."""
    header, tier = request.headers.get("x-forebay-class"), body.get("service_tier")
    by_header, by_tier = latency_class(header, "x-forebay-class"), latency_class(tier, "service_tier")
    if UNSPECIFIED not in (by_header, by_tier) and by_header != by_tier:
        raise invalid("service_tier", f"service_tier {tier!a} contradicts the header x-forebay-class {header!a}: send one of them")
    return by_header or by_tier


def asked_deadline(request: Request) -> float | None:
    """x-forebay-deadline: seconds that the answer may take."""
    header = request.headers.get("x-forebay-deadline")
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_SECONDS:
        raise invalid(
            "x-forebay-deadline", f"x-forebay-deadline is {header[:32]!a}: send seconds, above 0 and at most {MAX_DEADLINE_SECONDS:g}"
        )
    return seconds


def whole(request: Request, name: str, default: int, most: int) -> int:
    """A query's whole number, 1 to `most`. Raises INVALID_ARGUMENT."""
    text = request.query_params.get(name, str(default))
    if not _WHOLE.fullmatch(text) or not 1 <= int(text) <= most:
        raise invalid(name, f"{name} is {text[:32]!a}: it must be a whole number, 1 to {most}")
    return int(text)


def of_class(request: Admitted) -> dict[str, str]:
    """The answer's headers that say which class a request has, and from which it was lowered."""
    headers = {"x-forebay-class": CLASS_NAMES[request.latency_class]}
    return headers | {"x-forebay-class-lowered-from": CLASS_NAMES[request.lowered_from]} if request.lowered_from else headers
