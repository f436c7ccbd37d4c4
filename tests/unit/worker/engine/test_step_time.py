"""The fit against steps whose costs are known."""

import random

import pytest

from services.worker.engine.step_time import Load, StepTime


def seconds(load: Load) -> float:
    return 10e-3 + 0.2e-3 * load.num_tokens + 0.1e-3 * load.num_rows + 1e-6 * load.num_keys


def some_load(rng: random.Random) -> Load:
    sequences = rng.randint(1, 16)
    return Load(sequences + rng.choice([0, 5, 40]), sequences + rng.choice([0, 5]), sequences * rng.randint(50, 900))


def test_finds_what_a_draft_costs_through_noise_and_stalls() -> None:
    rng, fitted = random.Random(1), StepTime()
    assert not fitted.known
    for _ in range(400):
        load = some_load(rng)
        stall = 0.3 if rng.random() < 0.05 else 0.0
        fitted.record(load, seconds(load) * rng.uniform(0.95, 1.05) + stall)
    assert fitted.known
    assert fitted.draft_seconds() == pytest.approx(0.3e-3, rel=0.25)
    assert fitted.seconds(Load(8, 8, 2000)) == pytest.approx(seconds(Load(8, 8, 2000)), rel=0.1)


def test_the_first_draft_has_a_price_of_its_own() -> None:
    rng, fitted = random.Random(2), StepTime()
    for _ in range(400):
        num_drafts = rng.choice([0, 0, 1, 2, 5])
        load = Load(4 + num_drafts, 4 + num_drafts, 1000, has_drafts=num_drafts > 0)
        fitted.record(load, (10e-3 + 0.3e-3 * load.num_tokens + 1e-3 * load.has_drafts) * rng.uniform(0.98, 1.02))
    assert fitted.drafting_seconds() == pytest.approx(1e-3, rel=0.3)
    assert fitted.draft_seconds() == pytest.approx(0.3e-3, rel=0.3)


def test_what_no_step_told_apart_costs_nearly_nothing() -> None:
    """So a draft is made, and the steps with it tell."""
    fitted = StepTime()
    for _ in range(40):
        fitted.record(Load(1, 1, 100), 0.01)
    assert 0 < fitted.draft_seconds() < 0.01 * 0.1
    for _ in range(40):
        fitted.record(Load(1, 1, 100), 0.01)
        fitted.record(Load(5, 5, 104), 0.05)
    assert fitted.draft_seconds() == pytest.approx(0.01, rel=0.05)


def test_no_cost_is_negative_whatever_was_measured() -> None:
    fitted = StepTime()
    for tokens in (1, 2, 4, 8, 16, 32) * 6:
        fitted.record(Load(tokens, 1, 10), 0.1 / tokens)
    assert fitted.draft_seconds() >= 0
    assert fitted.seconds(Load(1, 1, 1)) > 0


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    fitted = StepTime()
    for _ in range(20):
        fitted.record(Load(1, 1, 1), 0.0)
    assert not fitted.known


def test_its_line_is_what_a_step_without_drafts_takes() -> None:
    rng, fitted = random.Random(3), StepTime()
    assert fitted.line is None, "too few steps"
    for _ in range(200):
        load = some_load(rng)
        fitted.record(load, seconds(load))
    assert fitted.line is not None
    fixed, token, row, key = fitted.line
    assert fixed + 8 * token + 8 * row + 2000 * key == pytest.approx(seconds(Load(8, 8, 2000)), rel=0.05)
