"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}} and the headers their retries obey."""

import math
from typing import Any

import orjson
from starlette.responses import Response

from services.common.errors import Code, StatusError
from services.gateway.http import ratelimit

_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "overloaded_error",
    504: "timeout_error",
}


_STATUS_BY_REASON = {"IDEMPOTENCY_KEY_REUSED": 422, "IDEMPOTENCY_MODEL_CHANGED": 409}
_OVER_QUOTA, _NEVER_FITS = "QUOTA_EXCEEDED", "REQUEST_TOO_LARGE"  # the scheduler's reasons


class HttpError(StatusError):
    """What has a place in HTTP alone: 405, 408, 413, 415."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message, reason=reason)
        self.status = status


def status_of(error: StatusError) -> int:
    """The HTTP status that says what the gRPC status says."""
    if isinstance(error, HttpError):
        return error.status
    return _STATUS_BY_REASON.get(error.reason) or _STATUS.get(error.code, 500)


def body_of(error: StatusError) -> dict[str, Any]:
    """The error object. `code` is the machine-readable reason in lower case, or OpenAI's word for a quota's."""
    status = status_of(error)
    kind, code = _TYPE.get(status, "invalid_request_error" if status < 500 else "server_error"), error.reason.lower()
    if error.reason == _OVER_QUOTA:
        kind, code = ratelimit.unit_of(error), "rate_limit_exceeded"
    elif error.reason == _NEVER_FITS:
        kind = code = "insufficient_quota"
    param = error.violations[0].field if error.violations else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def response(error: StatusError, headers: dict[str, str] | None = None) -> Response:
    """The whole answer."""
    out = dict(headers or {}) | ratelimit.of_error(error)
    status = status_of(error)
    if error.reason == _NEVER_FITS:
        out["x-should-retry"] = "false"  # as it is, it can never fit
    elif status in (429, 503):
        seconds = error.retry_after_seconds or 1.0
        out["retry-after"] = str(max(1, math.ceil(seconds)))
        out["retry-after-ms"] = str(max(1, math.ceil(seconds * 1000)))
    if status == 408:
        out["connection"] = "close"  # the rest of the body may come yet
    if status in (409, 504):
        out["x-should-retry"] = "false"  # the same deadline would pass again; another call has taken this one's key
    if status == 401:
        out["www-authenticate"] = 'Bearer realm="forebay"'
    return Response(orjson.dumps(body_of(error)), status, out, "application/json")
