"""One figure of a bench as the JSON line that it prints."""


def line(figure: str, value: float | str | None, unit: str, target: float | None = None) -> dict[str, object]:
    """`value` is null where it couldn't be had, `holds` without a value or a target."""
    holds = None if target is None or not isinstance(value, float | int) else value >= target
    return {
        "figure": figure,
        "value": round(value, 3) if isinstance(value, float) else value,
        "unit": unit,
        "target": target,
        "holds": holds,
    }
