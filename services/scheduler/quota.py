"""What a ticket takes of its org's quota, where the org stands, and the errors that say so. Counts nothing itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from google.rpc import error_details_pb2

from forebay.v1 import types_pb2
from services.common.errors import Code, StatusError
from services.policy.org import OrgPolicy
from services.scheduler.policy.order import Ticket

CONCURRENT_RETRY_SECONDS = 1.0
"""Nobody knows when one of the org's own requests will end."""


@dataclass(frozen=True)
class Bucket:
    """One bucket of an org. `limit`: what it holds when full, 0: there is none."""

    limit: int = 0
    remaining: int = 0
    reset_seconds: float = 0.0


@dataclass(frozen=True)
class QuotaState:
    """Where an org stands."""

    requests: Bucket
    tokens: Bucket

    @classmethod
    def parse(cls, reply: Sequence[int]) -> Self:
        """From a script's flat list."""
        requests, tokens = reply[:3], reply[3:]
        return cls(Bucket(requests[0], requests[1], requests[2] / 1000), Bucket(tokens[0], tokens[1], tokens[2] / 1000))

    def to_proto(self) -> types_pb2.QuotaState:
        """For the wire."""
        return types_pb2.QuotaState(
            requests_limit=self.requests.limit,
            requests_remaining=self.requests.remaining,
            requests_reset_seconds=self.requests.reset_seconds,
            tokens_limit=self.tokens.limit,
            tokens_remaining=self.tokens.remaining,
            tokens_reset_seconds=self.tokens.reset_seconds,
        )


UNKNOWN = QuotaState(Bucket(), Bucket())
"""Nobody has asked, or there is no limit."""


@dataclass(frozen=True)
class Over:
    """A ticket that was not taken. `kinds`: of requests, tokens, concurrent. After `wait_seconds` the buckets have enough."""

    kinds: tuple[str, ...]
    wait_seconds: float
    state: QuotaState


def tokens_to_reserve(ticket: Ticket) -> int:
    """As many as the request could use."""
    return ticket.num_prompt_tokens + ticket.max_tokens * ticket.n


def as_argument(org: OrgPolicy, tickets: Sequence[Ticket]) -> str:
    """What scripts reserve by; of one ticket also what it takes."""
    limits = {"requests": [org.requests_per_minute, org.requests_burst], "tokens": [org.tokens_per_minute, org.tokens_burst]}
    own = {"prompt": tickets[0].num_prompt_tokens, "tokens": tokens_to_reserve(tickets[0])} if len(tickets) == 1 else {}
    return json.dumps({**own, "live": org.max_concurrent, "limits": limits})


def too_large(tickets: Sequence[Ticket], org: OrgPolicy) -> StatusError | None:
    """For tickets that even full buckets couldn't take together. Without a time to come back: the quota's size stands in the way.

    RESOURCE_EXHAUSTED and not INVALID_ARGUMENT, as the request is sound: another org, or this one with another policy, may send it.
    """
    tokens, num = sum(map(tokens_to_reserve, tickets)), len(tickets)
    if org.tokens_per_minute and tokens > org.tokens_burst:
        words = f"{_sum_of(tickets)} is {tokens}; {org.org} may use at most {org.tokens_burst} at once, so this never fits"
        return _exhausted("REQUEST_TOO_LARGE", f"{words}: lower max_tokens or shorten the prompt", org.org, ["tokens"])
    for kind, most in (("requests", org.requests_burst if org.requests_per_minute else 0), ("concurrent", org.max_concurrent)):
        if most and num > most:
            words = f"each of the {num} prompts is a request; {org.org} may begin at most {most} at once: send fewer prompts"
            return _exhausted("REQUEST_TOO_LARGE", words, org.org, [kind])
    return None


def _sum_of(tickets: Sequence[Ticket]) -> str:
    """As a client can check it."""
    prompt, first = sum(ticket.num_prompt_tokens for ticket in tickets), tickets[0]
    times = f"{len(tickets)} x " if len(tickets) > 1 else ""
    return f"{prompt} prompt tokens + {times}{first.n} x max_tokens {first.max_tokens}"


def refusal(tickets: Sequence[Ticket], org: OrgPolicy, over: Over) -> StatusError:
    """Names every limit that stood in the way, and when to come back."""
    left = f"{over.state.tokens.remaining} left, and this request reserves {sum(map(tokens_to_reserve, tickets))}"
    limits = {
        "requests": f"on requests ({org.requests_per_minute} per minute)",
        "tokens": f"on tokens ({org.tokens_per_minute} per minute; {left})",
        "concurrent": f"on requests at once ({org.max_concurrent})",
    }
    wait = max(over.wait_seconds, CONCURRENT_RETRY_SECONDS if "concurrent" in over.kinds else 0.0)
    words = f"{org.org} has reached its limit {' and '.join(limits[kind] for kind in over.kinds)}: try again in {wait:.3g} s"
    return _exhausted("QUOTA_EXCEEDED", words, org.org, over.kinds, wait, over.state)


def _exhausted(
    reason: str, words: str, org: str, kinds: Sequence[str], wait: float | None = None, state: QuotaState | None = None
) -> StatusError:
    failure = error_details_pb2.QuotaFailure()
    for kind in kinds:
        failure.violations.add(subject=f"org:{org}", description=f"{kind}: {words}")
    details = [failure] if state is None else [failure, state.to_proto()]
    return StatusError(Code.RESOURCE_EXHAUSTED, words, reason=reason, retry_after_seconds=wait, details=details)
