"""Why a ticket went where it went: what each worker would have cost, and why others could not be chosen. Written down, decides nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CANDIDATES = 16
OLD_TERMS = ("waiting", "preempted", "prefill", "load", "rivals", "cache")
"""Of decisions that were written down without the names of their terms, by schedulers of before."""


@dataclass(frozen=True)
class Candidate:
    """A worker that was looked at, with its cost by the decision's terms; `refused` says why it could not be chosen and has no cost."""

    worker_id: str
    cost: Sequence[float] = ()
    refused: str = ""


@dataclass(frozen=True)
class Decision:
    """The chosen candidate is the first. `num_candidates` counts those left out, too. `waited_for`: why not the last time.

    terms: names of the parts of every cost, in the order in which they count; see explain.proto.
    """

    num_candidates: int
    candidates: Sequence[Candidate]
    waited_for: str = ""
    scheduler_id: str = ""
    terms: Sequence[str] = OLD_TERMS


def dumps(decision: Decision, scheduler_id: str) -> str:
    """As compact JSON, to be kept with the ticket."""
    rows = [[c.worker_id, c.refused, *(round(term, 4) for term in c.cost)] for c in decision.candidates]
    return json.dumps([scheduler_id, decision.num_candidates, decision.waited_for, rows, list(decision.terms)], separators=(",", ":"))


def loads(text: str) -> Decision | None:
    """What `dumps` wrote; None for an empty text."""
    if not text:
        return None
    scheduler_id, num_candidates, waited_for, rows, *more = json.loads(text)
    terms = tuple(more[0]) if more else OLD_TERMS
    candidates = [Candidate(worker, tuple(cost), refused) for worker, refused, *cost in rows]
    return Decision(num_candidates, candidates, waited_for, scheduler_id, terms)
