"""What the spans of a placement say, and that without a trace there are none."""

from services.common import semconv, tracing
from services.scheduler.ledger import Lease
from services.scheduler.policy.decision import OLD_TERMS, Candidate, Decision
from services.scheduler.policy.fleet import Worker
from services.scheduler.policy.order import Ticket
from services.scheduler.policy.pick import Placement
from services.scheduler.spans import decided, trace_placement
from tests.spans import recorded

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
DECISION = Decision(
    4,
    [Candidate("w1", (0, 0, 32, 0.5, 0.25, 0.1)), Candidate("w2", (1, 0, 48, 1, 1, 0.9)), Candidate("w3", refused="room")],
    waited_for="share",
)


def placement(traceparent: str, decision: Decision | None = DECISION) -> Placement:
    ticket = Ticket("r1", "acme", 2, "tiny@fp32", "v1", 16, 16, traceparent=traceparent)
    return Placement(ticket, Worker("w1", "i1", "a:1", 8, 8, {}), 1, 2, 64, decision)


LEASE = Lease("r1", 3, "w1", "i1", "a:1", 1.5)


def test_queue_and_choice_lie_below_the_request() -> None:
    with recorded() as spans:
        trace_placement(placement(TRACEPARENT), LEASE)
    pick, queue = spans.ended
    assert (queue.name, f"{queue.parent.span_id:016x}") == ("queue", "00f067aa0ba902b7")
    assert [f"{link.context.span_id:016x}" for link in queue.links] == ["00f067aa0ba902b7"]
    assert 1.4 < (queue.end_time - queue.start_time) / 1e9 < 2.5
    assert queue.attributes[semconv.FOREBAY_WAITED_FOR] == "share"
    assert (pick.name, pick.parent.span_id) == ("pick", queue.context.span_id)
    assert (pick.attributes[semconv.FOREBAY_WORKER], pick.attributes[semconv.FOREBAY_EPOCH]) == ("w1", 3)
    assert pick.attributes[semconv.FOREBAY_NUM_CANDIDATES] == 4


def test_costs_stand_in_the_candidates_order_and_the_refused_apart() -> None:
    told = decided(DECISION)
    assert told[semconv.FOREBAY_CANDIDATES] == ["w1", "w2"]
    assert {term: told[f"{semconv.FOREBAY_COST}.{term}"] for term in OLD_TERMS} == {
        "waiting": [0, 1],
        "preempted": [0, 0],
        "prefill": [32, 48],
        "load": [0.5, 1],
        "rivals": [0.25, 1],
        "cache": [0.1, 0.9],
    }
    assert told[semconv.FOREBAY_REFUSED] == ["w3: room"]


def test_a_placement_without_a_decision_has_its_spans_too() -> None:
    with recorded() as spans:
        trace_placement(placement(TRACEPARENT, None), LEASE)
    assert [span.name for span in spans.ended] == ["pick", "queue"]


def test_a_request_without_a_trace_has_none() -> None:
    with recorded() as spans:
        trace_placement(placement(""), LEASE)
    assert not spans.num_started
    trace_placement(placement(TRACEPARENT), LEASE)  # tracing is off
    assert not tracing.is_on()
