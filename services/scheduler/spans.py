"""The spans of a ticket that was placed, made at once by whichever scheduler placed it: the queue, and the choice of a worker."""

from services.common import semconv, tracing
from services.scheduler.ledger import Lease
from services.scheduler.policy.decision import Decision
from services.scheduler.policy.pick import Placement


def trace_placement(placement: Placement, lease: Lease) -> None:
    """Below the request's span, which came through Redis with the ticket: maybe from a gateway that waits at another scheduler."""
    request = tracing.remote(placement.ticket.traceparent)
    if not request:
        return
    decision = placement.decision
    waited_for = decision.waited_for if decision is not None else ""
    queue = tracing.start(
        semconv.SPAN_QUEUE,
        request,
        attributes={semconv.FOREBAY_WAITED_FOR: waited_for},
        links=[request],
        seconds_ago=lease.queued_seconds,
    )
    attributes: dict[str, tracing.Value] = {semconv.FOREBAY_WORKER: lease.worker_id, semconv.FOREBAY_EPOCH: lease.epoch}
    if decision is not None:
        attributes.update(decided(decision))
    pick = tracing.start(semconv.SPAN_PICK, queue, attributes=attributes)
    pick.end()
    queue.end()


def decided(decision: Decision) -> dict[str, tracing.Value]:
    """Candidates with their cost term by term, in one order; then the refused, each with its reason."""
    fitting = [candidate for candidate in decision.candidates if not candidate.refused]
    return {
        semconv.FOREBAY_NUM_CANDIDATES: decision.num_candidates,
        semconv.FOREBAY_CANDIDATES: [candidate.worker_id for candidate in fitting],
        **{f"{semconv.FOREBAY_COST}.{term}": [float(c.cost[index]) for c in fitting] for index, term in enumerate(decision.terms)},
        semconv.FOREBAY_REFUSED: [f"{c.worker_id}: {c.refused}" for c in decision.candidates if c.refused],
    }
