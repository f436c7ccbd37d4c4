"""The spans of a ticket that was placed, made at once by whichever scheduler placed it: the queue, and the choice of a worker."""

from services.common import semconv, tracing
from services.scheduler.ledger import Lease
from services.scheduler.policy.order import Ticket


def trace_placement(ticket: Ticket, lease: Lease) -> None:
    """Below the request's span, which came through Redis with the ticket: maybe from a gateway that waits at another scheduler."""
    request = tracing.remote(ticket.traceparent)
    if not request:
        return
    attributes: dict[str, tracing.Value] = {
        semconv.FOREBAY_REQUEST_ID: ticket.request_id,
        semconv.FOREBAY_WORKER: lease.worker_id,
        semconv.FOREBAY_EPOCH: lease.epoch,
    }
    queue = tracing.start(semconv.SPAN_QUEUE, request, links=[request], seconds_ago=lease.queued_seconds)
    pick = tracing.start(semconv.SPAN_PICK, queue, attributes=attributes)
    pick.end()
    queue.end()
