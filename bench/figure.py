"""One figure of a bench as the JSON line that it prints."""

import json


def line(figure: str, value: float | str | None, unit: str, target: float | None = None, *, at_most: bool = False) -> dict[str, object]:
    """`value` is null where it couldn't be had, `holds` without a value or a target. A target is reached from below, or else `at_most`."""
    holds = None if target is None or not isinstance(value, float | int) else value <= target if at_most else value >= target
    return {
        "figure": figure,
        "value": round(value, 3 if abs(value) >= 0.1 else 5) if isinstance(value, float) else value,
        "unit": unit,
        "target": target,
        "holds": holds,
    }


def show(figure: dict[str, object]) -> None:
    """Prints it."""
    print(json.dumps(figure), flush=True)
