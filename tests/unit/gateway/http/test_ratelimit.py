"""Headers of a quota, in OpenAI's words."""

import pytest

from forebay.v1 import types_pb2
from services.common.errors import Code, StatusError
from services.gateway.http.ratelimit import headers, of_error, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (-3, "0s"), (0.0004, "1ms"), (0.012, "12ms"), (0.9991, "1s"), (1, "1s"), (1.2, "1.2s"), (59.001, "59.001s"),
        (59.9999, "1m0s"), (60, "1m0s"), (60.2, "1m1s"), (360, "6m0s"), (3599.5, "1h0m0s"), (3723, "1h2m3s"), (90_000, "25h0m0s"),
    ],
)  # fmt: skip
def test_times_as_openai_writes_them_and_never_too_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_only_limits_that_there_are() -> None:
    quota = types_pb2.QuotaState(requests_limit=60, requests_remaining=59, requests_reset_seconds=1)
    assert headers(quota) == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59", "x-ratelimit-reset-requests": "1s",
    }  # fmt: skip
    assert headers(types_pb2.QuotaState(tokens_limit=9, tokens_remaining=-2, tokens_reset_seconds=360)) == {
        "x-ratelimit-limit-tokens": "9", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s",
    }  # fmt: skip
    assert headers(types_pb2.QuotaState()) == {}


def test_of_an_error_that_says_where_the_quota_stands() -> None:
    assert of_error(StatusError(Code.RESOURCE_EXHAUSTED, "full")) == {}
    error = StatusError(Code.RESOURCE_EXHAUSTED, "full", details=[types_pb2.OrgPolicy(org="x"), types_pb2.QuotaState(tokens_limit=1)])
    assert of_error(error)["x-ratelimit-limit-tokens"] == "1"
