"""The rates of the last second's steps."""

import pytest

from services.worker.turn import Step, StepWindow


def test_the_window_is_the_last_second() -> None:
    window = StepWindow()
    window.record(Step("", 0.0, 0.5, 10, 4))
    window.record(Step("", 0.6, 0.8, 10, 6))
    assert window.utilization(1.0) == pytest.approx(0.7)
    assert window.step_seconds(1.0) == pytest.approx(0.35)
    assert window.tokens_per_second(1.0) == 10
    assert window.utilization(1.3) == pytest.approx(0.4)
    assert window.utilization(1.3, running_since=1.1) == pytest.approx(0.6)
    assert window.utilization(9.0, running_since=1.1) == 1.0
    assert (window.utilization(9.0), window.step_seconds(9.0), window.tokens_per_second(9.0)) == (0, 0, 0)
