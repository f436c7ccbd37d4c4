"""How models write calls of tools: as a grammar that makes them, and for templates that know no tools, as plain messages."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.tools import Tool, ToolUse
from services.text.grammar import Grammar, json_rule


@dataclass(frozen=True)
class ToolFormat:
    """A call is `tag`, `before`, {"name": NAME, `arguments`: {...}}, `end`; several are joined by `between`."""

    tag: str  # empty: a reply that begins with a brace is a call
    before: str
    arguments: str
    end: str
    between: str


HERMES = ToolFormat("<tool_call>", "\n", "arguments", "\n</tool_call>", "\n")
LLAMA3 = ToolFormat("", "", "parameters", "", "; ")

_INSTRUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def format_of(source: str) -> ToolFormat | None:
    """What a chat template's model writes; HERMES, in plain messages, where it knows no tools; None where it is a form not known here."""
    if "<function=" in source:
        return None
    if "<tool_call>" in source or not knows_tools(source):
        return HERMES
    return LLAMA3 if '"parameters"' in source or "<|python_tag|>" in source else None


def knows_tools(source: str) -> bool:
    """Whether a template renders tools itself."""
    return re.search(r"\btools\b", source) is not None


def tool_grammar(form: ToolFormat, use: ToolUse, answer: Grammar | None = None) -> Grammar:
    """Calls alone where one is required; else calls or an `answer`, which needs a form with a tag to tell the two apart.

    Without one the answer is free text, in which a call, once begun, is one of these tools' with arguments that fit.
    """
    rules = [line for index, tool in enumerate(use.callable) for line in _call_rules(form, index, tool)]
    call = f"({' | '.join(f'call_{index}' for index in range(len(use.callable)))})"
    more = f"({_text(form.between + form.tag + form.before)} {call} {_text(form.end)})*" if use.parallel else ""
    calls = f"{_text(form.before)} {call} {_text(form.end)} {more}"
    if use.required:
        start = [f"start: {_text(form.tag)} {calls}"]
    elif answer is not None:
        assert form.tag, "no answer could be told from a call"
        assert answer.rule is not None, "Lark in a rule"
        start = [f"start: answer | {_text(form.tag)} {calls}", f"answer: {answer.rule}"]
    elif form.tag:
        start = [f"start: TEXT | tag {calls}", f"tag[lazy]: TEXT {_text(form.tag)}", r"TEXT: /(.|\n)*/"]
    else:
        start = [f"start: TEXT | {calls}", r"TEXT: /([^{](.|\n)*)?/"]
    return Grammar("lark", "\n".join([*start, *rules]))


def _call_rules(form: ToolFormat, index: int, tool: Tool) -> list[str]:
    head = _text(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
    # The arguments are a schema of their own, so that references in it begin at its root.
    return [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: {json_rule(tool.parameters)}"]


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def as_plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are described in the system message, calls and results are text."""
    described = "\n".join(json.dumps(tool.described()) for tool in tools)
    first = [_INSTRUCTION.format(tools=described)] if tools else []
    rest = list(messages)
    if first and rest and rest[0]["role"] == "system":
        first = [rest[0]["content"], *first]
        rest = rest[1:]
    system = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    return [*system, *map(_plain, rest)]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        HERMES.tag + HERMES.before + json.dumps(call["function"]) + HERMES.end for call in message.get("tool_calls", ())
    ]  # fmt: skip
    content = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
