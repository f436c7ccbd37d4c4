"""How a field of the policy file is read: a node in, a plain value out, or PolicyError with what is wrong where. Knows no section."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.policy import document
from services.policy.document import Node, PolicyError, Scalar, Sequence

MAX_NAME_CHARS = 256
MAX_NAMES = 1000
_INTEGER = re.compile(r"[+-]?[0-9](?:_?[0-9])*")
_NUMBER = re.compile(r"[+-]?(?:[0-9](?:_?[0-9])*)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")

Reader = Callable[[Node, str], Any]
"""(node, dotted path for people) -> value."""


def integer(least: int, most: int) -> Reader:
    """A whole number in least .. most."""

    def read(node: Node, path: str) -> int:
        text = _text(node, path, f"a whole number from {least} to {most}")
        # The length first: Python takes its time over a number of a million digits.
        value = int(text) if len(text) <= 20 and _INTEGER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            raise PolicyError(node.line, f"{path} is {text[:40]}; it must be a whole number from {least} to {most}")
        return value

    return read


def number(least: float, most: float, *, above: bool = False) -> Reader:
    """A number in least .. most; `above`: not least itself."""
    span = f"a number {'over' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}"

    def read(node: Node, path: str) -> float:
        text = _text(node, path, span)
        value = float(text) if len(text) <= 40 and any(c.isdigit() for c in text) and _NUMBER.fullmatch(text) else math.nan
        if not (least < value if above else least <= value) or not value <= most:
            raise PolicyError(node.line, f"{path} is {text[:40]}; it must be {span}")
        return value

    return read


def name(node: Node, path: str) -> str:
    """A name of 1 .. 256 printable characters."""
    text = _text(node, path, "a name")
    check_name(text, node.line, path)
    return text


def check_name(text: str, line: int, path: str) -> None:
    """PolicyError for what can't be a name."""
    if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
        raise PolicyError(line, f"{path} is {text[:40]!r}; it must be a name of 1 to {MAX_NAME_CHARS} printable characters")


def names(node: Node, path: str) -> tuple[str, ...]:
    """A list of names, each once."""
    if not isinstance(node, Sequence):
        raise PolicyError(node.line, f"{path} must be a list of names, such as [a, b]")
    if len(node.items) > MAX_NAMES:
        raise PolicyError(node.line, f"{path} has {len(node.items)} names; it may have at most {MAX_NAMES}")
    found: dict[str, None] = {}
    for item in node.items:
        text = name(item, f"a name in {path}")
        if text in found:
            raise PolicyError(item.line, f"{path} names {text} twice")
        found[text] = None
    return tuple(found)


def choice(values: Mapping[str, Any]) -> Reader:
    """One of some words, for what it stands for."""

    def read(node: Node, path: str) -> Any:
        text = _text(node, path, " or ".join(values))
        if text not in values:
            raise PolicyError(node.line, f"{path} is {text[:40]}; it must be {' or '.join(values)}")
        return values[text]

    return read


def record(node: Node, path: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """A mapping with these fields, all of them optional: those that are there."""
    values = {}
    for key, (line, value) in mapping(node, path).items():
        if key not in readers:
            where = f"of {path}" if path else "of a policy"
            raise PolicyError(line, f"{key[:40]!r} is no field {where}; there are: {', '.join(readers)}")
        values[key] = readers[key](value, f"{path}.{key}" if path else key)
    return values


def mapping(node: Node, path: str) -> dict[str, tuple[int, Node]]:
    """The entries of a mapping; none of an empty value."""
    if isinstance(node, document.Mapping):
        return node.entries
    if isinstance(node, Scalar) and node.is_nothing:
        return {}
    raise PolicyError(node.line, f"{path or 'the policy'} must be a mapping of names to values")


def _text(node: Node, path: str, expected: str) -> str:
    if not isinstance(node, Scalar):
        raise PolicyError(node.line, f"{path} must be {expected}, not a {'list' if isinstance(node, Sequence) else 'mapping'}")
    if node.is_nothing:
        raise PolicyError(node.line, f"{path} has no value; it must be {expected}")
    return node.text
