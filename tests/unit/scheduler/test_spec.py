"""What Redis holds of a ticket is read back as it was written, also where a scheduler of a later version has written more."""

import json
from dataclasses import replace

from services.scheduler.policy.order import Ticket
from services.scheduler.spec import read_spec, write_spec
from tests.scheduler_harness import make_ticket


def _read(spec: str) -> Ticket:
    return read_spec("r1", spec, "7", "[]", 3, 1500, 250)


def test_a_ticket_comes_back_as_it_was_written() -> None:
    ticket = make_ticket("r1", order=7, block_hashes="0123456789abcdef", hash_tokens=64, traceparent="00-a-b-01")
    told_apart = {"num_delivered_tokens": 3, "asked_seconds": 1.5, "waited_seconds": 0.25, "excluded_workers": frozenset[str]()}
    read = _read(write_spec(ticket))
    assert read == replace(ticket, **told_apart)  # type: ignore[arg-type]  # one dict, several types
    assert read.traceparent == ticket.traceparent


def test_what_a_later_version_says_of_a_ticket_is_left_out() -> None:
    spec = write_spec(make_ticket("r1"))
    assert _read(json.dumps({**json.loads(spec), "unheard_of": 1})) == _read(spec)
