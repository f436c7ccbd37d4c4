"""Where an org stands with its quota, in the headers that OpenAI's clients read: x-ratelimit-*."""

import math

from google.rpc import error_details_pb2

from forebay.v1 import types_pb2
from services.common.errors import StatusError

_MS_PER_HOUR, _MS_PER_MINUTE = 3_600_000, 60_000


def headers(quota: types_pb2.QuotaState) -> dict[str, str]:
    """The limits that there are, what is left of each, and the time until it is whole again."""
    return {
        f"x-ratelimit-{what}-{unit}": value
        for unit, limit, remaining, reset_seconds in (
            ("requests", quota.requests_limit, quota.requests_remaining, quota.requests_reset_seconds),
            ("tokens", quota.tokens_limit, quota.tokens_remaining, quota.tokens_reset_seconds),
        )
        if limit > 0
        for what, value in (("limit", str(limit)), ("remaining", str(max(0, remaining))), ("reset", span(reset_seconds)))
    }


def of_error(error: StatusError) -> dict[str, str]:
    """The headers of a refusal that says where the quota stands; none for any other."""
    quota = types_pb2.QuotaState()
    return next((headers(quota) for detail in error.details if detail.Unpack(quota)), {})


def unit_of(error: StatusError) -> str:
    """What a refusal is about: "tokens", or "requests", as OpenAI's errors say in their type."""
    failure = error_details_pb2.QuotaFailure()
    kinds = [broken.description.partition(":")[0] for detail in error.details if detail.Unpack(failure) for broken in failure.violations]
    return "tokens" if kinds[:1] == ["tokens"] else "requests"


def span(seconds: float) -> str:
    """As OpenAI writes a time to wait: 12ms, 1.2s, 6m0s, 1h0m0s. Never too short, and exact to the millisecond below a minute."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    if milliseconds < _MS_PER_MINUTE:
        return f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, rest = divmod(math.ceil(milliseconds / 1000) * 1000, _MS_PER_HOUR)
    minutes, rest = divmod(rest, _MS_PER_MINUTE)
    return (f"{hours}h" if hours else "") + f"{minutes}m{rest // 1000}s"
