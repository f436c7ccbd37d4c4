"""Which JSON schemas are enforced whole. llguidance ignores keywords that it doesn't know: here they are refused, each at its place.

What it knows and can't do (a lookahead in a pattern, `oneOf` of schemas that overlap), it refuses itself when it compiles. Formats are
enforced by their syntax: every year has a 29 February.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_DEPTH = 64
MAX_MULTIPLE = 10_000
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_SCHEMA = frozenset(("items", "additionalProperties"))
_SCHEMAS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_ENFORCED = frozenset(
    (
        *("type", "const", "enum", "$ref"),
        *("required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_SAYS_NOTHING = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id", "$anchor")
)
_KNOWN = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _ENFORCED | _SAYS_NOTHING


class SchemaError(ValueError):
    """A schema can't be enforced. `pointer` says where (RFC 6901, in a URI fragment), the message why."""

    def __init__(self, pointer: str, why: str) -> None:
        super().__init__(why)
        self.pointer = pointer


def check_schema(schema: object) -> None:
    """Raises SchemaError for a schema of which a part would be ignored, or that is nested deeper than MAX_DEPTH."""
    level = [("#", schema)]
    for _ in range(MAX_DEPTH):
        level = [below for pointer, part in level for below in _checked(pointer, part)]
        if not level:
            return
    raise SchemaError(level[0][0][:80], f"it is nested deeper than {MAX_DEPTH} levels")


def _checked(pointer: str, schema: object) -> Iterator[tuple[str, object]]:
    """The schemas right below this one, each with its place."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise SchemaError(pointer, "a schema must be an object or a boolean")
    for keyword, value in schema.items():
        place = f"{pointer}/{_escaped(keyword)}"
        if keyword not in _KNOWN:
            raise SchemaError(place, f"the keyword {keyword[:64]!a} is not offered: it would not be enforced")
        if (check := _CHECKS.get(keyword)) is not None:
            check(place, value)
        if keyword in _SCHEMA:
            yield place, value
        elif keyword in _SCHEMAS:
            if not isinstance(value, list):
                raise SchemaError(place, "it must be a list of schemas")
            yield from ((f"{place}/{index}", part) for index, part in enumerate(value))
        elif keyword in _NAMED_SCHEMAS:
            if not isinstance(value, Mapping):
                raise SchemaError(place, "it must be an object of schemas")
            yield from ((f"{place}/{_escaped(name)}", part) for name, part in value.items())
    _check_counts(pointer, schema)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:64]


def _check_type(place: str, value: object) -> None:
    for name in value if isinstance(value, list) else [value]:
        if name not in TYPES:
            raise SchemaError(place, f"a type must be one of {', '.join(TYPES)}")


def _check_format(place: str, value: object) -> None:
    if value not in FORMATS:
        raise SchemaError(place, f"this format is not enforced; these are: {', '.join(FORMATS)}")


def _check_ref(place: str, value: object) -> None:
    if not isinstance(value, str) or not value.startswith("#"):
        raise SchemaError(place, "only references into the schema itself (#/...) are followed")


def _check_items(place: str, value: object) -> None:
    if isinstance(value, list):
        raise SchemaError(place, "a list of schemas is prefixItems, and items is one schema")


def _check_multiple(place: str, value: object) -> None:
    """A matcher has about as many states as the number has units in its last place."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SchemaError(place, "it must be a number above 0")
    number = Decimal(repr(value))
    if number * Decimal(10) ** max(0, -int(number.as_tuple().exponent)) > MAX_MULTIPLE:
        raise SchemaError(place, f"it must be at most {MAX_MULTIPLE} units of its last decimal place")


def _check_number(place: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(place, "it must be a number")


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "type": _check_type,
    "format": _check_format,
    "$ref": _check_ref,
    "items": _check_items,
    "multipleOf": _check_multiple,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _check_number),
}


def _check_counts(pointer: str, schema: Mapping[str, Any]) -> None:
    """A name that `properties` doesn't list may come twice and count once: only one such name can be asked for."""
    least, required = schema.get("minProperties"), schema.get("required", ())
    if isinstance(least, int) and least > 1 + (len(required) if isinstance(required, list) else 0):
        raise SchemaError(f"{pointer}/minProperties", "it can be enforced up to one more than there are required properties")
