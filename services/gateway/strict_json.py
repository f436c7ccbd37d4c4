"""JSON as this mesh reads it: no NaN, no name twice in one object, no lone surrogate, and not deeper than MAX_DEPTH."""

import json
from typing import Any, NoReturn

MAX_DEPTH = 64


def loads(text: str) -> Any:
    """The value. Raises ValueError with words that go on after "the body ..."."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        _check_tree(value, check_text="\\u" in text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # ours, or an integer of thousands of digits
        raise ValueError(f"is not JSON that can be used: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:64]!a} is given twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_tree(root: Any, *, check_text: bool) -> None:
    """Depth, and (only where the text has escapes at all) that every string can be written as UTF-8."""
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
                if check_text:
                    below.extend(value.keys())
            elif isinstance(value, list):
                below.extend(item for item in value if check_text or not isinstance(item, str | int | float))
            elif check_text and isinstance(value, str):
                _check_text(value)
        if not below:
            return
        level = below
    raise RecursionError


def _check_text(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string contains the lone surrogate U+{ord(value[error.start]):04X}: escape the whole pair") from None
