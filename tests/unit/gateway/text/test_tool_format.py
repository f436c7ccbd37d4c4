"""Calls of tools: whatever a model says under the grammar is read as calls whose arguments validate; and what templates are shown."""

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from services.gateway.text.reply import Reply, ReplyForm
from services.gateway.text.template import ChatTemplate
from services.gateway.text.tool_format import HERMES, LLAMA3, ToolFormat, format_of, tool_grammar
from services.gateway.tools import ToolUse, validate_tools
from services.text.grammar import Grammar
from services.text.tokenizer import SpecialTokens
from tests.unit.gateway.text.test_reply import whole
from tests.unit.text.test_compiler import COMPILER, accepts
from tests.unit.text.test_json_schema import spoken

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{0,5}$"}},
    },
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
HERMES_TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><|im_end|>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
LLAMA_TEMPLATE = (
    """{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}"""
)


def use(choice: Any = None, parallel: bool | None = None) -> ToolUse:
    made = validate_tools(TOOLS, choice, parallel)
    assert made is not None
    return made


def checked_calls(form: ToolFormat, text: str) -> tuple[str, list[str]]:
    """Content and names; each call's arguments are held to its schema."""
    reply = Reply(ReplyForm(form))
    content, _, calls = whole(reply.push(text) + reply.finish())
    assert reply.num_calls == len(calls)
    for name, arguments in calls:
        tool = next(tool for tool in use().tools if tool.name == name)
        jsonschema.validate(json.loads(arguments), dict(tool.parameters))
    return content, [name for name, _ in calls]


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_what_must_be_calls_is_calls_that_fit(form: ToolFormat, choice: Any, parallel: bool) -> None:
    matcher = COMPILER.compile_now(tool_grammar(form, use(choice, parallel)))
    seen: list[list[str]] = []
    for seed in range(60):
        text = spoken(matcher.deep_copy(), random.Random(seed), 600)
        if text is not None:
            content, names = checked_calls(form, text)
            assert content == ""
            seen.append(names)
    assert seen
    assert all(seen)
    if choice == "required":
        assert {name for names in seen for name in names} == {"get_weather", "now"}
        assert (max(map(len, seen)) > 1) is parallel
    else:
        assert all(names == ["get_weather"] for names in seen)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "parallel", "yes", "no"),
    [
        (
            HERMES,
            True,
            ["", "Hi {there}", "a <tool", CALL, f"Let me see.\n{CALL}", f"{CALL}\n{CALL}", "<think>\nhm\n</think>\n\n" + CALL],
            [
                *("<tool_call>", "<tool_call>x", CALL + " done", CALL.replace("now", "nope")),
                *(CALL.replace("{}", arguments) for arguments in ("[]", '{"a": 1}')),
            ],
        ),
        (HERMES, False, ["Hi", CALL], [f"{CALL}\n{CALL}"]),
        (
            LLAMA3,
            True,
            ["", "Hi {there}", '{"name": "now", "parameters": {}}', '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'],
            ["{", '{"name": "nope", "parameters": {}}', '{"name": "now", "parameters": {}} done', '{"name": "now", "arguments": {}}'],
        ),
    ],
)  # fmt: skip
def test_free_text_holds_calls_that_fit_or_none(form: ToolFormat, parallel: bool, yes: Sequence[str], no: Sequence[str]) -> None:
    matcher = COMPILER.compile_now(tool_grammar(form, use("auto", parallel)))
    assert [text for text in yes if not accepts(matcher, text)] == []
    assert [text for text in no if accepts(matcher, text)] == []
    for text in yes:
        content, names = checked_calls(form, text)
        assert bool(names) == ('"name"' in text)
        assert "".join(content.split()) in "".join(text.split())


@pytest.mark.parametrize(
    ("answer", "yes", "no"),
    [
        (Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'), ['{"a": 1}', "{}"], ['{"a": "b"}', "x"]),
        (Grammar("json_object"), ['{"a": "<tool_call>"}', '{"name": "now", "arguments": {}}'], ["[]", ""]),
        (Grammar("regex", "[ab]+|c"), ["abba", "c"], ["abc", ""]),
        (Grammar("choice", '["yes", "no"]'), ["yes", "no"], ["yesno", "maybe"]),
    ],
)
def test_an_answer_of_a_form_or_calls_and_not_both(answer: Grammar, yes: Sequence[str], no: Sequence[str]) -> None:
    matcher = COMPILER.compile_now(tool_grammar(HERMES, use("auto"), answer))
    assert [text for text in (*yes, CALL, f"{CALL}\n{CALL}") if not accepts(matcher, text)] == []
    assert [text for text in (*no, yes[0] + CALL, f"{CALL}{yes[0]}", "Hi", CALL.replace("now", "nope")) if accepts(matcher, text)] == []
    for text in yes:
        assert checked_calls(HERMES, text) == (text, [])
    assert checked_calls(HERMES, CALL) == ("", ["now"])


def test_many_tools_come_to_a_grammar_within_bounds() -> None:
    tools = [{"type": "function", "function": {**WEATHER, "name": f"tool_{number}"}} for number in range(128)]
    made = validate_tools(tools, "required", None)
    assert made is not None
    assert accepts(COMPILER.compile_now(tool_grammar(HERMES, made)), CALL.replace("now", "tool_77").replace("{}", '{"city": "Rome"}'))


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (HERMES_TEMPLATE, HERMES),
        (LLAMA_TEMPLATE, LLAMA3),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", None),
        ("{% if tools %}<tool_call>\n<function=name>{% endif %}", None),
    ],
)
def test_the_form_is_the_templates(source: str, form: ToolFormat | None) -> None:
    assert format_of(source) is form
    assert ChatTemplate(source, SpecialTokens()).tool_format is form


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Time?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
]


def test_a_template_that_knows_tools_gets_them() -> None:
    text = ChatTemplate(HERMES_TEMPLATE, SpecialTokens()).render(CONVERSATION, tools=use().tools)
    assert '"name": "get_weather"' in text
    assert '<tool_call>{"a": 1}</tool_call>' in text
    assert "tool\nnoon" in text


def test_a_template_that_knows_none_gets_plain_messages() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, SpecialTokens())
    text = template.render(CONVERSATION, tools=use().tools)
    assert text.startswith("[system]Be brief.\n\n# Tools")
    assert '"name": "now"' in text
    assert '[assistant]<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>' in text
    assert text.endswith("[user]<tool_response>\nnoon\n</tool_response>")
    assert template.render(CONVERSATION[:2]) == "[system]Be brief.[user]Time?"
    assert template.render(CONVERSATION[1:2], tools=use().tools).startswith("[system]# Tools")
