"""What the wire says, as the scheduler's own nouns, and back. Decides nothing but what makes no sense."""

import re

from forebay.v1 import admin_pb2, explain_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, invalid
from services.policy.org import NAME, OrgPolicy
from services.scheduler.api_keys import KeyInfo
from services.scheduler.ledger import Settlement
from services.scheduler.policy.decision import loads
from services.scheduler.usage import UsageRow

MAX_ID_LENGTH = 256
MAX_HASHES = 256
HASH_BYTES = 8
MAX_HASH_TOKENS = 4096
CLAIM_HASH_BYTES = 32
MAX_DEADLINE_SECONDS = 7 * 86_400.0
_CLAIMED_ID = re.compile(r"[0-9a-f]{30}00")


def check_id(name: str, value: str) -> None:
    """INVALID_ARGUMENT for what can't be a name."""
    if not 0 < len(value) <= MAX_ID_LENGTH:
        raise invalid(name, f"{name} has {len(value)} characters; it must have 1 to {MAX_ID_LENGTH}")


def check_hashes(ticket: scheduler_pb2.Ticket) -> None:
    """INVALID_ARGUMENT for block hashes that can't be the prompt's."""
    hashes, tokens = ticket.block_hashes, ticket.hash_tokens
    if len(hashes) > MAX_HASHES:
        raise invalid("ticket.block_hashes", f"ticket.block_hashes has {len(hashes)} entries; it may have at most {MAX_HASHES}")
    if any(len(entry) != HASH_BYTES for entry in hashes):
        raise invalid("ticket.block_hashes", f"each of ticket.block_hashes must have {HASH_BYTES} bytes")
    if hashes and not 1 <= tokens <= MAX_HASH_TOKENS:
        raise invalid("ticket.hash_tokens", f"ticket.hash_tokens is {tokens}; with block_hashes it must be 1 to {MAX_HASH_TOKENS}")
    if len(hashes) * tokens > ticket.num_prompt_tokens:
        words = f"{len(hashes)} of {tokens} tokens each are more than the prompt's {ticket.num_prompt_tokens}"
        raise invalid("ticket.block_hashes", f"ticket.block_hashes: {words}")


def check_claim(request: scheduler_pb2.ClaimRequest) -> None:
    """INVALID_ARGUMENT for a claim that makes no sense."""
    for name in ("org", "model"):
        check_id(name, getattr(request, name))
    for name in ("key_hash", "digest"):
        if len(getattr(request, name)) != CLAIM_HASH_BYTES:
            raise invalid(name, f"{name} has {len(getattr(request, name))} bytes; it must have {CLAIM_HASH_BYTES}")
    if not _CLAIMED_ID.fullmatch(request.request_id):
        raise invalid("request_id", f"request_id is {request.request_id[:40]!r}; it must be 30 hex digits and 00")
    if not 0 < request.deadline_seconds <= MAX_DEADLINE_SECONDS:
        words = f"it must be above 0 and at most {MAX_DEADLINE_SECONDS:g}"
        raise invalid("deadline_seconds", f"deadline_seconds is {request.deadline_seconds:g}; {words}")


def check_new_org(name: str, value: str) -> None:
    """INVALID_ARGUMENT for what no token could name as its org; what was once set for such a one can still be listed and taken back."""
    if not NAME.fullmatch(value):
        raise invalid(name, f"{name} is {value[:40]!r}; an org has 1 to 128 letters, digits, '.', '_' and '-'")


def read_settlement(request: scheduler_pb2.FinishRequest) -> Settlement:
    """What is counted and charged. A request that failed on our side is free; one that was left or ran out of time pays for what it got.

    So does one whose client read too slowly: RESOURCE_EXHAUSTED behind tokens.
    """
    ok, left, late, slow = (code.value[0] for code in (Code.OK, Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED))
    read_slowly = request.status_code == slow and request.usage.completion_tokens > 0
    return Settlement(
        prompt_tokens=max(0, request.usage.prompt_tokens),
        completion_tokens=max(0, request.usage.completion_tokens),
        cached_tokens=max(0, request.usage.cached_tokens),
        failed=request.status_code not in (ok, left),
        free=request.status_code not in (ok, left, late) and not read_slowly,
    )


def decision_to_proto(text: str) -> explain_pb2.Decision | None:
    """A decision as it was kept with the ticket, for the wire; None where none was."""
    decision = loads(text)
    if decision is None:
        return None
    candidates = [
        explain_pb2.Candidate(
            worker_id=candidate.worker_id,
            chosen=number == 0,
            cost=[explain_pb2.CostTerm(name=name, value=value) for name, value in zip(decision.terms, candidate.cost, strict=False)],
            refused=candidate.refused,
        )
        for number, candidate in enumerate(decision.candidates)
    ]
    return explain_pb2.Decision(
        scheduler_id=decision.scheduler_id,
        num_candidates=decision.num_candidates,
        candidates=candidates,
        waited_for=decision.waited_for,
    )


def org_to_proto(policy: OrgPolicy) -> types_pb2.OrgPolicy:
    """For the wire."""
    return types_pb2.OrgPolicy(
        org=policy.org,
        tier=policy.tier,
        requests_per_minute=policy.requests_per_minute,
        tokens_per_minute=policy.tokens_per_minute,
        requests_burst=policy.requests_burst,
        tokens_burst=policy.tokens_burst,
        default_class=types_pb2.LatencyClass.ValueType(policy.default_class),
        ceiling_class=types_pb2.LatencyClass.ValueType(policy.ceiling_class),
        models=policy.models,
        max_concurrent=policy.max_concurrent,
        kv_share=policy.kv_share,
        weight=policy.weight,
    )


def key_to_proto(info: KeyInfo) -> admin_pb2.ApiKey:
    """For the wire."""
    return admin_pb2.ApiKey(
        key_id=info.key_id, org=info.org, name=info.name, roles=info.roles, created_at=info.created_at, expires_at=info.expires_at
    )


def usage_to_proto(row: UsageRow) -> admin_pb2.UsageRow:
    """For the wire."""
    return admin_pb2.UsageRow(
        org=row.org,
        day=row.day,
        model=row.model,
        latency_class=types_pb2.LatencyClass.ValueType(row.latency_class),
        num_requests=row.requests,
        num_failed=row.failed,
        prompt_tokens=row.prompt,
        completion_tokens=row.completion,
        cached_tokens=row.cached,
    )
