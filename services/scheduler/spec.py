"""A ticket's spec: what Redis keeps of it for whichever scheduler places it, and which no script reads."""

import json
from dataclasses import fields

from services.scheduler.policy.order import Ticket

_TICKET_FIELDS = frozenset(known.name for known in fields(Ticket))


def write_spec(ticket: Ticket) -> str:
    """What never changes of a ticket, as JSON."""
    spec = dict(vars(ticket))  # its fields hold nothing that would have to be copied
    for told_apart in ("request_id", "order", "num_delivered_tokens", "excluded_workers", "awaited", "asked_seconds", "waited_seconds"):
        del spec[told_apart]
    return json.dumps(spec)


def read_spec(request_id: str, spec: str, order: str, excluded: str, delivered: int, asked_ms: int, waited_ms: int) -> Ticket:
    """A scheduler of a later version may say more of a ticket: what isn't known is left out."""
    return Ticket(
        request_id=request_id,
        order=int(order),
        excluded_workers=frozenset(json.loads(excluded)) if excluded != "[]" else frozenset(),
        num_delivered_tokens=delivered,
        asked_seconds=asked_ms / 1000,
        waited_seconds=waited_ms / 1000,
        **{name: value for name, value in json.loads(spec).items() if name in _TICKET_FIELDS},
    )
