"""OpenAI's `response_format` and vLLM's `structured_outputs` as the one grammar that both come to."""

from collections.abc import Mapping
from typing import Any

from services.common.errors import invalid
from services.gateway.field import shown

_FORMAT_FIELDS = frozenset(("type", "json_schema"))
_SCHEMA_FIELDS = frozenset(("name", "description", "strict", "schema"))
_KINDS = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""vLLM's words for our kinds."""


def grammar_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The validator's field `grammar`, where the body asks for one, and what the client calls it."""
    by_format, by_output = _response_format(body.get("response_format")), _structured_outputs(body.get("structured_outputs"))
    if by_format is not None and by_output is not None:
        raise invalid("structured_outputs", "structured_outputs and response_format both say what the output is: send one of them")
    if by_format is not None:
        return {"grammar": by_format}, {"grammar": "response_format"}
    return ({}, {}) if by_output is None else ({"grammar": by_output}, {"grammar": "structured_outputs"})


def _response_format(value: object) -> dict[str, Any] | None:
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(name, f"{name} is {shown(value)}: it must be an object with a type")
    _check_names(name, value, _FORMAT_FIELDS)
    kind = value.get("type")
    if kind == "json_schema":
        return {"json_schema": _schema(value.get("json_schema"))}
    if kind not in ("text", "json_object"):
        raise invalid(f"{name}.type", f"{name}.type is {shown(kind)}: it must be text, json_object or json_schema")
    if value.get("json_schema") is not None:
        raise invalid(f"{name}.json_schema", f"{name}.json_schema needs the type json_schema")
    return {"json_object": True} if kind == "json_object" else None


def _schema(value: object) -> Any:
    name = "response_format.json_schema"
    if not isinstance(value, Mapping) or value.get("schema") is None:
        raise invalid(name, f"{name} must be an object with a schema")
    _check_names(name, value, _SCHEMA_FIELDS)
    if not isinstance(value.get("strict"), bool | None):
        raise invalid(f"{name}.strict", f"{name}.strict is {shown(value['strict'])}: it must be true or false; schemas are always enforced")
    if not isinstance(value["schema"], Mapping):
        raise invalid(f"{name}.schema", f"{name}.schema is {shown(value['schema'])}: it must be an object")
    return value["schema"]


def _structured_outputs(value: object) -> dict[str, Any] | None:
    name = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(name, f"{name} is {shown(value)}: it must be an object with one of {', '.join(_KINDS)}")
    _check_names(name, value, frozenset(_KINDS))
    given = {_KINDS[kind]: part for kind, part in value.items() if part is not None}
    if len(given) != 1:
        raise invalid(name, f"{name} has {len(given)} of {', '.join(_KINDS)}: send one")
    return given


def _check_names(name: str, value: Mapping[str, Any], known: frozenset[str]) -> None:
    for field, part in value.items():
        if field not in known and part is not None:
            raise invalid(f"{name}.{field[:64]}", f"{name}.{field[:64]!a} is not offered: known are {', '.join(sorted(known))}")
