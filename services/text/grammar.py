"""A grammar as a request names it, and its source in llguidance's Lark dialect. Pure text: compiles nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from llguidance import regex_to_lark

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
KINDS: tuple[str, ...] = get_args(Kind)

# The model chooses how to spell forced text. Forcing its tokenisation would cost a second of the step where a grammar forces a megabyte.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # between JSON's tokens: small models would go on with it for ever


@dataclass(frozen=True)
class Grammar:
    """What an output must look like. `text`: a schema as JSON, a regex, a JSON list of choices, or Lark; empty for json_object."""

    kind: Kind
    text: str = ""

    @property
    def rule(self) -> str | None:
        """What stands for it in a rule of Lark; None for Lark, which has rules of its own."""
        match self.kind:
            case "json_schema":
                return json_rule(json.loads(self.text))
            case "json_object":
                return json_rule({"type": "object"})
            case "regex":
                return f"/{regex_to_lark(self.text, use_ascii='')}/"
            case "choice":
                return " | ".join(map(json.dumps, json.loads(self.text)))
            case "lark":
                return None

    @property
    def source(self) -> str:
        """For llguidance."""
        return _OPTIONS + (self.text if self.rule is None else f"start: {self.rule}")


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A schema as what stands for a rule in Lark."""
    if not isinstance(schema, Mapping):
        schema = {} if schema else {"enum": []}
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": _WHITESPACE}, **schema})
