"""The line of a figure."""

from bench.figure import line


def test_a_target_decides_what_holds() -> None:
    assert line("a", 2.0, "x", 1.5) == {"figure": "a", "value": 2.0, "unit": "x", "target": 1.5, "holds": True}
    assert line("a", 1.23456, "x", 1.5)["holds"] is False
    assert line("a", 1.23456, "x")["value"] == 1.235
    assert line("a", 0.0032987, "nats")["value"] == 0.0033, "a divergence is small"


def test_some_targets_are_for_values_below() -> None:
    assert line("a", 1.5, "x", 1.5, at_most=True)["holds"] is True
    assert line("a", 2.0, "x", 1.5, at_most=True)["holds"] is False
    assert line("a", None, "x", 1.5, at_most=True)["holds"] is None


def test_without_value_or_target_nothing_holds_or_fails() -> None:
    assert line("a", None, "x", 1.5)["holds"] is None
    assert line("a", 3.0, "x")["holds"] is None
    assert line("a", "name 1.0", "version")["value"] == "name 1.0"
