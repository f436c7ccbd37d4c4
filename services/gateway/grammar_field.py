"""The grammar of a request: one kind, within bounds, and a schema of which nothing would be ignored. Compiles nothing."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from services.common.errors import invalid
from services.gateway import strict_json
from services.gateway.field import Field, check_unicode
from services.text.grammar import KINDS, Grammar, Kind
from services.text.json_schema import SchemaError, check_schema

MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMAR_CHOICES = 1024

# What llguidance takes and this server would not do: sample a part otherwise, count its tokens, take tokens back.
_NOT_OFFERED = re.compile(r"^[ \t]*[?!]*[\w-]+[ \t]*\[[^\]\n]*\b(max_tokens|temperature|stop)\b", re.MULTILINE)
_OPTIONS = re.compile(r"^[ \t]*%llguidance\b", re.MULTILINE)
_JSON = re.compile(r"%json\s*")


def check_grammar(entry: Field) -> Grammar:
    """The grammar in a field: an object with one of KINDS. A schema may come as a value or as JSON text. Raises INVALID_ARGUMENT."""
    if isinstance(entry.value, Grammar):  # checked before
        return entry.value
    kinds = sorted(entry.value) if isinstance(entry.value, Mapping) and all(kind in KINDS for kind in entry.value) else []
    if len(kinds) != 1:
        raise entry.refuse(f"must be an object with one of {', '.join(KINDS)}")
    kind, value = kinds[0], entry.value[kinds[0]]
    text = _CHECKS[kind](entry, value)
    if len(text) > MAX_GRAMMAR_BYTES or len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise invalid(entry.name, f"{entry.name} has a {kind} of {len(text)} characters: it may have at most {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(cast("Kind", kind), text)


def check_schema_field(entry: Field) -> None:
    """Refuses a schema that could not be enforced whole, naming the place in it."""
    try:
        check_schema(entry.value)
    except SchemaError as error:
        raise invalid(entry.name, f"{entry.name} at {ascii(error.pointer)[1:-1]}: {error}") from None


def _json_schema(entry: Field, value: object) -> str:
    if isinstance(value, str):
        try:
            value = strict_json.loads(_text(entry, value))
        except ValueError as error:
            raise invalid(entry.name, f"{entry.name} has a schema that {error}") from None
    check_schema_field(Field(entry.name, value))
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise invalid(entry.name, f"{entry.name} has a schema with a number that JSON has no word for") from None


def _json_object(entry: Field, value: object) -> str:
    if value is not True:
        raise invalid(entry.name, f"{entry.name} has a json_object that isn't true: leave it out for any text")
    return ""


def _choice(entry: Field, value: object) -> str:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_GRAMMAR_CHOICES:
        raise invalid(entry.name, f"{entry.name} has a choice that isn't a list of 1 to {MAX_GRAMMAR_CHOICES} texts")
    return json.dumps([_text(entry, text) for text in value], ensure_ascii=False)


def _text(entry: Field, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(entry.name, f"{entry.name} must hold text, of at least one character")
    if len(value) > MAX_GRAMMAR_BYTES:
        raise invalid(entry.name, f"{entry.name} has a text of {len(value)} characters: it may have at most {MAX_GRAMMAR_BYTES} bytes")
    check_unicode(Field(entry.name, value))
    return value


def _regex(entry: Field, value: object) -> str:
    text = _text(entry, value)
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the compiler would drop it
        raise invalid(entry.name, f"{entry.name} has a regex that ends in a backslash, which escapes nothing")
    return text


def _lark(entry: Field, value: object) -> str:
    text = _text(entry, value)
    found = _NOT_OFFERED.search(text)
    if found is not None:
        raise invalid(entry.name, f"{entry.name} has a rule with {found[1]}: it is not offered, and would not be enforced")
    if _OPTIONS.search(text) is not None:
        raise invalid(entry.name, f"{entry.name} has %llguidance options: they are not offered; leave them out")
    for schema in _JSON.finditer(text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, schema.end())
        except (ValueError, RecursionError):
            continue  # no schema, or one that the compiler refuses
        check_schema_field(Field(entry.name, value))
    return text


_CHECKS: Mapping[str, Callable[[Field, Any], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}
