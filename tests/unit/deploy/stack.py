"""deploy/ as its readers take it: the Compose files, with what each adds to the other, and the Dockerfile's targets."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
CORE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
OVERLAY = yaml.safe_load((DEPLOY / "compose.observe.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
OBSERVERS = ("collector", "jaeger", "prometheus", "grafana")
SERVICES: dict[str, dict[str, Any]] = CORE["services"] | {name: OVERLAY["services"][name] for name in OBSERVERS}
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-?+])([^{}]*))?\}")


def stages() -> dict[str, str]:
    """The Dockerfile's stages: name -> its lines."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {name: f"FROM {parent}\n{body}" for parent, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def filled(value: object, **variables: str) -> str:
    """A value with these variables, and the defaults of the others."""

    def fill(match: re.Match[str]) -> str:
        name, kind, word = match.groups()
        if kind == "+":
            return word if variables.get(name) else ""
        return variables.get(name) or word or ""

    text, before = str(value), ""
    while text != before:  # one may be in another
        text, before = _VARIABLE.sub(fill, text), text
    return text


def addresses(service: str, *endings: str) -> Iterator[str]:
    """host:port that a service's variables with one of these endings name."""
    for name, value in SERVICES[service].get("environment", {}).items():
        if name.endswith(endings):
            yield from str(value).split(",")
