"""What a refusal for its quota says."""

import json

from google.rpc import error_details_pb2

from forebay.v1 import types_pb2
from services.common.errors import Code
from services.policy.org import OrgPolicy
from services.scheduler.quota import Bucket, Over, QuotaState, as_argument, refusal, too_large
from tests.scheduler_harness import make_ticket

ORG = OrgPolicy("acme", requests_per_minute=6, tokens_per_minute=100, tokens_burst=80, max_concurrent=3).complete()
STATE = QuotaState(Bucket(6, 2, 40.0), Bucket(80, 30, 30.0))


def test_a_script_is_told_the_limits_and_the_most_that_the_request_could_use() -> None:
    assert json.loads(as_argument(ORG, [make_ticket(num_prompt_tokens=5, max_tokens=7, n=3)])) == {
        "prompt": 5,
        "tokens": 26,
        "live": 3,
        "limits": {"requests": [6, 6], "tokens": [100, 80]},
    }


def test_a_request_that_never_fits_has_no_time_to_come_back() -> None:
    assert too_large([make_ticket(max_tokens=64)], ORG) is None
    assert too_large([make_ticket(max_tokens=10**6)], OrgPolicy("acme")) is None, "no limit"
    error = too_large([make_ticket(max_tokens=65)], ORG)
    assert error is not None
    assert (error.code, error.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, None)
    assert "is 81; acme may use at most 80 at once" in error.message


def test_a_refusal_names_what_stood_in_the_way() -> None:
    error = refusal([make_ticket()], ORG, Over(("tokens",), 1.2, STATE))
    assert (error.code, error.reason, error.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 1.2)
    assert (
        error.message == "acme has reached its limit on tokens (100 per minute; 30 left, and this request reserves 32): try again in 1.2 s"
    )
    failure, state = error_details_pb2.QuotaFailure(), types_pb2.QuotaState()
    assert error.details[0].Unpack(failure)
    assert [(violation.subject, violation.description) for violation in failure.violations] == [("org:acme", f"tokens: {error.message}")]
    assert error.details[1].Unpack(state)
    assert state == types_pb2.QuotaState(
        requests_limit=6, requests_remaining=2, requests_reset_seconds=40, tokens_limit=80, tokens_remaining=30, tokens_reset_seconds=30
    )


def test_nobody_knows_when_a_place_among_the_concurrent_is_free() -> None:
    assert refusal([make_ticket()], ORG, Over(("concurrent",), 0.0, STATE)).retry_after_seconds == 1.0
    assert refusal([make_ticket()], ORG, Over(("requests", "concurrent"), 9.0, STATE)).retry_after_seconds == 9.0


def test_the_prompts_of_a_request_are_counted_together() -> None:
    three = [make_ticket(str(number), num_prompt_tokens=number, max_tokens=10, n=2) for number in (1, 2, 3)]
    error = too_large(three, OrgPolicy("acme", tokens_per_minute=65).complete())
    assert error is not None
    assert "6 prompt tokens + 3 x 2 x max_tokens 10 is 66; acme may use at most 65 at once" in error.message
    assert too_large(three, OrgPolicy("acme", tokens_per_minute=66, requests_per_minute=3, max_concurrent=3).complete()) is None
    for limit in ({"requests_per_minute": 2}, {"max_concurrent": 2}):
        error = too_large(three, OrgPolicy("acme", **limit).complete())
        assert error is not None
        assert "each of the 3 prompts is a request; acme may begin at most 2 at once" in error.message
    assert "this request reserves 66" in refusal(three, ORG, Over(("tokens",), 1.2, STATE)).message
