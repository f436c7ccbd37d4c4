"""What warmth costs and how fast a worker computes prompts, by what it says of itself."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.node import MOST_SLOWED, NodeState, StepCost, prefill_rate, thermal_factor

STEP = StepCost(fixed=0.01, token=0.001, row=0.0, key=0.0)


@pytest.mark.parametrize(
    ("celsius", "slope", "factor"),
    [(None, None, 1.0), (74.9, None, 1.0), (79.0, 0.0, 0.85), (83.0, 0.0, 0.7), (95.0, 0.0, 0.7), (74.0, 0.5, 0.85), (79.0, -5.0, 0.85)],
)
def test_the_thermal_factor_falls_from_75_celsius_to_the_limit_and_looks_ahead(celsius: float, slope: float, factor: float) -> None:
    assert thermal_factor(NodeState(temperature_celsius=celsius, celsius_per_second=slope)) == pytest.approx(factor)


def test_a_device_with_a_limit_of_its_own_is_slower_from_below_that() -> None:
    low = NodeState(temperature_celsius=68.0, slowdown_celsius=70.0)
    assert thermal_factor(low) < 1 == thermal_factor(replace(low, temperature_celsius=61.0))


@given(st.floats(0, 150), st.floats(-5, 5), st.floats(10, 120))
def test_no_temperature_gives_a_factor_out_of_bounds(celsius: float, slope: float, limit: float) -> None:
    node = NodeState(temperature_celsius=celsius, celsius_per_second=slope, slowdown_celsius=limit)
    assert MOST_SLOWED <= thermal_factor(node) <= 1


def test_prompts_are_computed_in_what_decodes_leave_of_each_step() -> None:
    node = NodeState(step=STEP, max_step_tokens=100)
    assert prefill_rate(node, 0, 0) == pytest.approx(100 / 0.11)
    assert prefill_rate(node, 20, 0) == pytest.approx(80 / 0.11)
    assert prefill_rate(NodeState(), 0, 0) == 0, "not known"
