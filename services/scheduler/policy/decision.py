"""Why a ticket went where it went: what each worker would have cost, and why others could not be chosen. Written down, decides nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CANDIDATES = 16
TERMS = ("waiting", "preempted", "prefill", "load", "rivals", "cache")
"""Names of a cost's terms, in the order in which they count. See explain.proto."""


@dataclass(frozen=True)
class Candidate:
    """A worker that was looked at, with its cost by TERMS; `refused` says why it could not be chosen and has no cost."""

    worker_id: str
    cost: Sequence[float] = ()
    refused: str = ""


@dataclass(frozen=True)
class Decision:
    """The chosen candidate is the first. `num_candidates` counts those left out, too. `waited_for`: why not the last time."""

    num_candidates: int
    candidates: Sequence[Candidate]
    waited_for: str = ""
    scheduler_id: str = ""


def dumps(decision: Decision, scheduler_id: str) -> str:
    """As compact JSON, to be kept with the ticket."""
    rows = [[c.worker_id, c.refused, *(round(term, 4) for term in c.cost)] for c in decision.candidates]
    return json.dumps([scheduler_id, decision.num_candidates, decision.waited_for, rows], separators=(",", ":"))


def loads(text: str) -> Decision | None:
    """What `dumps` wrote; None for an empty text."""
    if not text:
        return None
    scheduler_id, num_candidates, waited_for, rows = json.loads(text)
    return Decision(num_candidates, [Candidate(worker, tuple(cost), refused) for worker, refused, *cost in rows], waited_for, scheduler_id)
