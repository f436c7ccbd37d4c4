"""The tools that a chat offers its model, and whether it must use them. Takes OpenAI's shape, unchecked; knows no model's format."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import StatusError, invalid
from services.gateway.field import Field, check_unicode, shown
from services.gateway.grammar_field import check_schema_field

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict"))
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON schema of an object, enforced on every call."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


@dataclass(frozen=True)
class ToolUse:
    """The tools shown to the model, and those that it may call: all, or the one that was named."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    required: bool
    parallel: bool


def validate_tools(tools: object, choice: object, parallel: object, names: Mapping[str, str] = _NOTHING) -> ToolUse | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` come to; None where no tool is to be called. Raises INVALID_ARGUMENT."""
    entry, chosen = Field(names.get("tools", "tools"), tools), Field(names.get("tool_choice", "tool_choice"), choice)
    if parallel is not None and not isinstance(parallel, bool):
        raise Field("parallel_tool_calls", parallel).refuse("must be true or false")
    known = _tools(entry)
    named = _named(chosen)
    if named is None and choice not in (None, "none", "auto", "required"):
        raise chosen.refuse('must be none, auto, required, or {"type": "function", "function": {"name": ...}}')
    if not known and choice not in (None, "none"):
        raise chosen.refuse(f"needs {entry.name}")
    if not known or choice == "none":
        return None
    callable_tools = known if named is None else tuple(tool for tool in known if tool.name == named)
    if not callable_tools:
        raise invalid(chosen.name, f"{chosen.name} names {shown(named)}, which is not among {entry.name}")
    required = named is not None or choice == "required"
    return ToolUse(known, callable_tools, required, parallel=named is None and parallel is not False)


def _tools(entry: Field) -> tuple[Tool, ...]:
    if entry.value is None:
        return ()
    if not isinstance(entry.value, list | tuple):
        raise entry.refuse("must be a list of tools")
    if len(entry.value) > MAX_TOOLS:
        raise entry.refuse(f"may have at most {MAX_TOOLS} tools")
    tools = tuple(_tool(Field(f"{entry.name}[{index}]", item)) for index, item in enumerate(entry.value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise invalid(f"{entry.name}[{index}]", f"{entry.name}[{index}] has the name {shown(tool.name)} of a tool before it")
        seen.add(tool.name)
    num_bytes = sum(len(json.dumps(tool.described())) for tool in tools)
    if num_bytes > MAX_TOOLS_BYTES:
        raise invalid(entry.name, f"{entry.name} come to {num_bytes} bytes: they may have at most {MAX_TOOLS_BYTES}")
    return tools


def _tool(entry: Field) -> Tool:
    function = entry.value.get("function") if isinstance(entry.value, Mapping) and entry.value.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise entry.refuse('must be {"type": "function", "function": {"name": ...}}: other kinds are not offered')
    for name in function:
        if name not in _FUNCTION_FIELDS:
            raise invalid(f"{entry.name}.function", f"{entry.name}.function has {name[:64]!a}, which is not offered: leave it out")
    name = Field(f"{entry.name}.function.name", function.get("name"))
    if not isinstance(name.value, str) or not _NAME.fullmatch(name.value):
        raise name.refuse("must have 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(function.get("strict"), bool | None):
        raise Field(f"{entry.name}.function.strict", function["strict"]).refuse("must be true or false; parameters are always enforced")
    description = Field(f"{entry.name}.function.description", function.get("description") or "")
    if not isinstance(description.value, str):
        raise description.refuse("must be a text")
    check_unicode(description)
    return Tool(name.value, description.value, _parameters(Field(f"{entry.name}.function.parameters", function.get("parameters"))))


def _parameters(entry: Field) -> Mapping[str, Any]:
    if entry.value is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(entry.value, Mapping):
        raise entry.refuse("must be a JSON schema")
    check_schema_field(entry)
    if entry.value.get("type", "object") != "object":
        raise _not_an_object(entry)
    try:
        json.dumps(entry.value, allow_nan=False).encode()
    except ValueError:
        raise invalid(entry.name, f"{entry.name} has a number that JSON has no word for") from None
    return {"type": "object", **entry.value}


def _not_an_object(entry: Field) -> StatusError:
    return invalid(entry.name, f"{entry.name} has the type {shown(entry.value['type'])}: arguments are an object")


def _named(entry: Field) -> str | None:
    """The tool that must be called, where the choice names one."""
    value = entry.value
    if not isinstance(value, Mapping) or value.get("type") != "function" or set(value) != {"type", "function"}:
        return None
    function = value["function"]
    if not isinstance(function, Mapping) or set(function) != {"name"} or not isinstance(function["name"], str):
        return None
    return function["name"]
