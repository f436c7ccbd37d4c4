"""Envelopes, and what they make of a step's size and order."""

import math

import pytest

from services.worker.engine.deadlines import LEAST_PARTS, in_order, kept_back, max_tokens
from services.worker.engine.envelope import Envelope
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import RequestState, Sequence, SequenceState
from services.worker.engine.step_time import Load, StepTime

MOST = 256
NOW = 100.0


def decoding(name: str, num_output_tokens: int = 1, envelope: Envelope | None = None, latency_class: int = 2) -> Sequence:
    group = RequestState(EngineRequest(name, [1], latency_class=latency_class), b"", [], envelope=envelope or Envelope())
    tokens = [1] * (1 + num_output_tokens)
    return Sequence(group, 0, tokens, 1, 1000, frozenset(), [], state=SequenceState.RUNNING, num_computed_tokens=len(tokens) - 1)


def prompt(name: str, latency_class: int = 2, envelope: Envelope | None = None) -> Sequence:
    group = RequestState(EngineRequest(name, [1] * 50, latency_class=latency_class), b"", [], envelope=envelope or Envelope())
    return Sequence(group, 0, [1] * 50, 50, 1000, frozenset(), [], state=SequenceState.RUNNING)


def fitted() -> StepTime:
    """10 ms and 1 ms per token."""
    step_time = StepTime()
    for tokens in (1, 4, 16, 64, 256) * 8:
        step_time.record(Load(tokens, 1, 10), 10e-3 + 1e-3 * tokens)
    return step_time


def test_token_i_is_due_at_arrival_plus_ttft_plus_i_tpots() -> None:
    envelope = Envelope(arrival=90.0, ttft_seconds=2.0, tpot_seconds=0.5)
    assert envelope.first_due == 92.0
    assert [envelope.slack(index, NOW) for index in (1, 16, 20)] == [-7.5, 0.0, 2.0]
    assert Envelope(90.0, 2.0).slack(5, NOW) == math.inf
    assert Envelope(90.0, tpot_seconds=0.5).slack(5, NOW) == 0.5, "with no first deadline to count from, each token from the last"


def test_without_targets_a_step_is_as_large_as_it_may_be() -> None:
    assert max_tokens([decoding("a"), prompt("b")], MOST, fitted(), NOW) == MOST
    assert max_tokens([], MOST, fitted(), NOW) == MOST


@pytest.mark.parametrize("allowed", [0.06, 0.11, 0.21])
def test_a_step_ends_when_the_most_urgent_token_is_due(allowed: float) -> None:
    """Less the 10 ms and the decodes' own, a millisecond each."""
    running = [
        decoding("tight", 5, Envelope(NOW + allowed - 1.0 - 5 * 0.03, 1.0, 0.03)),
        decoding("loose", 5, Envelope(NOW, 9.0, 1.0)),
        decoding("none"),
        prompt("prompt"),
    ]
    assert max_tokens(running, MOST, fitted(), NOW) == pytest.approx(1000 * allowed - 10, abs=8)


def test_one_that_is_late_has_the_time_of_one_token_and_prompts_a_least_share() -> None:
    late = decoding("late", 5, Envelope(NOW - 50, 1.0, 0.08))
    assert max_tokens([late], MOST, fitted(), NOW) == pytest.approx(70, abs=8)
    hopeless = decoding("hopeless", 5, Envelope(NOW - 50, 1.0, 0.001))
    assert max_tokens([hopeless], MOST, fitted(), NOW) == 1 + MOST // LEAST_PARTS
    assert max_tokens([hopeless] * 3, 1, fitted(), NOW) == 1, "never more than a step may have"


def test_nothing_is_bounded_by_what_nobody_has_measured() -> None:
    assert max_tokens([decoding("tight", 1, Envelope(NOW, 0.001, 0.001))], MOST, StepTime(), NOW) == MOST


def test_urgent_decodes_then_prompts_by_class_and_deadline_then_decodes_with_slack() -> None:
    urgent = decoding("urgent", 1, Envelope(NOW, 0.05, 0.1))
    slack = decoding("slack", 1, Envelope(NOW, 5.0, 0.1))
    running = [
        prompt("late", 1, Envelope(NOW, 2.0)),
        prompt("soon", 1, Envelope(NOW, 1.0)),
        slack,
        urgent,
        decoding("none"),
        prompt("batch", 3),
    ]
    assert [s.request_id for s in in_order(running, 0.1, NOW)] == ["urgent", "none", "soon", "late", "batch", "slack"]


def test_prompts_leave_a_floor_to_those_of_lower_classes() -> None:
    assert kept_back([prompt("a", 1), prompt("b", 3), decoding("c", latency_class=2)]) == {1: 1 / 16, 3: 0}
    assert kept_back([prompt("a", 1), prompt("b", 2), prompt("c", 3)]) == {1: 2 / 16, 2: 1 / 16, 3: 0}
