"""Envelopes, and what they make of a step's size and order."""

import math

import pytest

from services.worker.engine.deadlines import (
    EXPECTED_SECONDS,
    LEAST_PARTS,
    MAX_SKIPS,
    NEWCOMER_PARTS,
    PROMPT_PARTS,
    Limits,
    Newcomers,
    in_order,
    kept_back,
    limits,
)
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


def newcomers(came: float = NOW, **targets: float) -> Newcomers:
    """Requests that came then; by class, as in c1=0.2."""
    found = Newcomers()
    for name, seconds in targets.items():
        found.note(EngineRequest(name, [1], latency_class=int(name[1:]), ttft_target_seconds=seconds), came)
    return found


def with_prompts(running: list[Sequence], step_time: StepTime | None = None) -> float:
    """Seconds of a step that computes prompts, too."""
    found = limits(running, Newcomers(), MOST, step_time or fitted(), NOW)
    assert found.seconds(decoding("any")) == math.inf, "decodes alone are no reason to leave one out"
    return found.seconds(prompt("any"))


def test_without_targets_a_step_is_as_long_as_it_gets() -> None:
    assert with_prompts([decoding("a"), prompt("b")]) == math.inf
    assert with_prompts([]) == math.inf


@pytest.mark.parametrize("allowed", [0.06, 0.11, 0.21])
def test_a_step_ends_when_the_most_urgent_token_is_due(allowed: float) -> None:
    running = [
        decoding("tight", 5, Envelope(NOW + allowed - 1.0 - 5 * 0.03, 1.0, 0.03)),
        decoding("loose", 5, Envelope(NOW, 9.0, 1.0)),
        decoding("none"),
        prompt("prompt"),
    ]
    assert with_prompts(running) == pytest.approx(allowed)


def test_one_that_is_late_has_the_time_of_one_token_and_prompts_a_least_share() -> None:
    late = decoding("late", 5, Envelope(NOW - 50, 1.0, 0.08))
    assert with_prompts([late]) == pytest.approx(0.08)
    hopeless = decoding("hopeless", 5, Envelope(NOW - 50, 1.0, 0.001))
    assert with_prompts([hopeless]) == pytest.approx(0.01 + 0.001 * (1 + MOST // LEAST_PARTS), rel=0.1)


def test_nothing_is_bounded_by_what_nobody_has_measured() -> None:
    assert with_prompts([decoding("tight", 1, Envelope(NOW, 0.001, 0.001))], StepTime()) == math.inf
    assert limits([], newcomers(c1=0.2), MOST, StepTime(), NOW) == Limits()


def test_lower_classes_keep_a_step_short_while_a_newcomer_may_come() -> None:
    batch = decoding("batch", latency_class=3)
    found = limits([batch], newcomers(c1=0.3, c2=2.0), MOST, fitted(), NOW)
    assert found.seconds(batch) == 0.3 / NEWCOMER_PARTS
    assert found.seconds(decoding("standard", latency_class=2)) == 0.3 / NEWCOMER_PARTS
    assert found.seconds(decoding("realtime", latency_class=1)) == math.inf
    assert limits([batch], newcomers(c2=0.3), MOST, fitted(), NOW).seconds(decoding("standard", latency_class=2)) == math.inf


def test_they_keep_it_shorter_while_its_prompt_is_computed() -> None:
    batch, chat = decoding("batch", latency_class=3), prompt("chat", 1)
    found = limits([chat, batch], newcomers(c1=0.6), MOST, fitted(), NOW)
    assert found.seconds(batch) == 0.6 / PROMPT_PARTS
    assert found.seconds(chat) == math.inf


def test_no_step_is_cut_so_short_that_it_does_little() -> None:
    """10 ms of each step are there without a token."""
    found = limits([decoding("batch", latency_class=3)], newcomers(c1=0.05), MOST, fitted(), NOW)
    assert found.seconds(decoding("batch", latency_class=3)) == pytest.approx(0.02, rel=0.1)


def test_nobody_is_expected_for_ever_nor_without_a_target() -> None:
    batch = decoding("batch", latency_class=3)
    assert limits([batch], newcomers(NOW - EXPECTED_SECONDS, c1=0.3), MOST, fitted(), NOW).seconds(batch) == math.inf
    assert limits([batch], newcomers(c1=0.0), MOST, fitted(), NOW).seconds(batch) == math.inf


def test_urgent_decodes_then_by_class_decodes_without_target_and_prompts_by_deadline_then_decodes_with_slack() -> None:
    urgent = decoding("urgent", 1, Envelope(NOW, 0.05, 0.1))
    slack = decoding("slack", 1, Envelope(NOW, 5.0, 0.1))
    running = [
        prompt("late", 1, Envelope(NOW, 2.0)),
        prompt("soon", 1, Envelope(NOW, 1.0)),
        slack,
        urgent,
        decoding("none"),
        prompt("none's prompt"),
        prompt("batch", 3),
    ]
    found = [s.request_id for s in in_order(running, 0.1, NOW)]
    assert found == ["urgent", "soon", "late", "none", "none's prompt", "batch", "slack"]


def test_whoever_was_left_out_goes_before_its_like() -> None:
    running = [decoding(name) for name in "abc"]
    running[1].num_skips, running[2].num_skips = 1, 2
    assert [s.request_id for s in in_order(running, 0.1, NOW)] == ["c", "b", "a"]
    batch, relaxed = decoding("batch", latency_class=3), decoding("relaxed", 1, Envelope(NOW, 0.0, 5.0))
    order = [prompt("prompt"), relaxed, batch]
    assert [s.request_id for s in in_order(order, 0.1, NOW)] == ["prompt", "batch", "relaxed"]
    batch.num_skips = relaxed.num_skips = MAX_SKIPS
    assert [s.request_id for s in in_order(order, 0.1, NOW)] == ["relaxed", "batch", "prompt"]


def test_prompts_leave_a_floor_to_those_of_lower_classes() -> None:
    a, b, c, d = prompt("a", 1), prompt("b", 2), prompt("c", 3), decoding("d", latency_class=2)
    assert kept_back([a, c]) == {a: 1 / 16, c: 0}
    assert kept_back([a, c, d]) == {a: 2 / 16, c: 0}, "those that decode, too"
    assert kept_back([a, b, c]) == {a: 2 / 16, b: 1 / 16, c: 0}
