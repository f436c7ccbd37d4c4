"""One figure of a bench as the JSON line that it prints."""


def line(figure: str, value: float | str | None, unit: str, target: float | None = None, holds: bool | None = None) -> dict[str, object]:
    """`value` is null where it couldn't be had. `holds`, where it isn't given: value >= target, null without either."""
    if holds is None and target is not None and isinstance(value, float | int):
        holds = value >= target
    return {
        "figure": figure,
        "value": round(value, 3) if isinstance(value, float) else value,
        "unit": unit,
        "target": target,
        "holds": holds,
    }
