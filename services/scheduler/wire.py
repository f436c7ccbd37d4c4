"""What the wire says, as the scheduler's own nouns, and back. Decides nothing but what makes no sense."""

import re
from dataclasses import replace

from forebay.v1 import admin_pb2, explain_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, invalid
from services.policy.org import NAME, OrgPolicy
from services.scheduler.api_keys import KeyInfo
from services.scheduler.ledger import Settlement
from services.scheduler.policy.decision import loads
from services.scheduler.policy.order import Ticket
from services.scheduler.usage import UsageRow

MAX_ID_LENGTH = 256
MAX_HASHES = 256
HASH_BYTES = 8
MAX_HASH_TOKENS = 4096
MAX_REGION = 64
MAX_TRACEPARENT = 55
"""Characters of a W3C traceparent."""
MAX_RESERVED = 256
"""Tickets of one Reserve."""
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


def read_ticket(t: scheduler_pb2.Ticket) -> Ticket:
    """The policy's ticket. INVALID_ARGUMENT where a field makes no sense: the gateway has checked users' input before."""
    for name in ("request_id", "org", "model"):
        check_id(f"ticket.{name}", getattr(t, name))
    if t.latency_class not in (types_pb2.LATENCY_CLASS_REALTIME, types_pb2.LATENCY_CLASS_STANDARD, types_pb2.LATENCY_CLASS_BATCH):
        raise invalid("ticket.latency_class", f"ticket.latency_class is {t.latency_class}; it must be realtime, standard or batch")
    for name, least in (("num_prompt_tokens", 1), ("max_tokens", 0), ("n", 1)):
        if getattr(t, name) < least:
            raise invalid(f"ticket.{name}", f"ticket.{name} is {getattr(t, name)}; it must be at least {least}")
    check_hashes(t)
    return Ticket(
        request_id=t.request_id,
        org=t.org,
        latency_class=t.latency_class,
        model=t.model,
        model_version=t.model_version,
        num_prompt_tokens=t.num_prompt_tokens,
        max_tokens=t.max_tokens,
        region=t.region[:MAX_REGION],
        n=t.n,
        traceparent=t.traceparent[:MAX_TRACEPARENT],
        block_hashes=b"".join(t.block_hashes).hex(),
        hash_tokens=t.hash_tokens,
    )


def read_place(request: scheduler_pb2.PlaceRequest) -> Ticket:
    """The ticket, with what this call says of it."""
    return replace(
        read_ticket(request.ticket),
        num_delivered_tokens=request.num_delivered_tokens,
        excluded_workers=frozenset(request.excluded_workers),
        awaited=tuple((dead.worker_id, dead.incarnation) for dead in request.awaited),
    )


def read_reserve(request: scheduler_pb2.ReserveRequest) -> list[Ticket]:
    """Tickets of one org, each once."""
    if not 1 <= len(request.tickets) <= MAX_RESERVED:
        raise invalid("tickets", f"tickets has {len(request.tickets)} entries; it must have 1 to {MAX_RESERVED}")
    tickets = [read_ticket(ticket) for ticket in request.tickets]
    if len({ticket.org for ticket in tickets}) > 1 or len({ticket.request_id for ticket in tickets}) < len(tickets):
        raise invalid("tickets", "tickets must be of one org and have an id each")
    return tickets


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
