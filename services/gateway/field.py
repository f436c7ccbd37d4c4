"""One field of a request as its client sees it, and how an error quotes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import StatusError, invalid


@dataclass(frozen=True)
class Field:
    """One field as its client calls it, and what came in it."""

    name: str
    value: Any

    def refuse(self, rule: str) -> StatusError:
        """`rule` goes on after "NAME is VALUE: it ..."."""
        return invalid(self.name, f"{self.name} is {shown(self.value)}: it {rule}")


def shown(value: object) -> str:
    """A client's value as an error quotes it: ASCII, and never long."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 64 else f"a string of {len(value)} characters"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"an object with {len(value)} entries"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def check_unicode(entry: Field) -> bytes:
    """The text in UTF-8; half of a surrogate pair has none."""
    try:
        encoded: bytes = entry.value.encode()
    except UnicodeEncodeError as error:
        raise invalid(entry.name, f"{entry.name} has half a surrogate pair at character {error.start}: send whole characters") from None
    return encoded
