"""Replies taken apart: the same parts however the text is cut, and no character lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.reply import Part, Reply, ReplyForm
from services.gateway.text.tool_format import HERMES, LLAMA3

PLAIN, THINKING = ReplyForm(), ReplyForm(thinks=True)
TOOLS, TOOLS_THINKING, LLAMA = ReplyForm(HERMES), ReplyForm(HERMES, thinks=True), ReplyForm(LLAMA3)
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "}\\"{", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {}]}'


def whole(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, calls."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.call is not None:
            if part.call.name:
                assert part.call.index == len(calls)
                calls.append((part.call.name, ""))
            calls[part.call.index] = (calls[part.call.index][0], calls[part.call.index][1] + part.call.arguments)
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


CASES = [
    (PLAIN, "hello <think>x</think> <tool_call>", "hello <think>x</think> <tool_call>", "", []),
    (THINKING, "hello", "hello", "", []),
    (THINKING, "<think>\nhm\n\nwell\n</think>\n\nhello", "hello", "hm\n\nwell", []),
    (THINKING, "\n<think></think>x", "x", "", []),
    (THINKING, "<think>\nnever done < </thin", "", "never done < </thin", []),
    (THINKING, "<thi", "<thi", "", []),
    (THINKING, "<think>a</think>", "", "a", []),
    (THINKING, "a<think>b</think>", "a<think>b</think>", "", []),
    (ReplyForm(thinks=True, begins_thinking=True), "\nhm</think>\nyes", "yes", "hm", []),
    (TOOLS, "no call < here", "no call < here", "", []),
    (TOOLS, CALL, "", "", [("get", ARGUMENTS)]),
    (TOOLS, f"Sure. {CALL}\n{CALL}\n", "Sure. ", "", [("get", ARGUMENTS)] * 2),
    (TOOLS, "<tool_call> not one", "<tool_call> not one", "", []),
    (TOOLS, '<tool_call>\n{"name": "get", "arg', '<tool_call>\n{"name": "get", "arg', "", []),
    (TOOLS, "<tool_call>" + "x" * 300, "<tool_call>" + "x" * 300, "", []),
    (TOOLS, '<tool_call>\n{"name": "get", "arguments": {"a": 1', "", "", [("get", '{"a": 1')]),
    (TOOLS, CALL + "and then", "and then", "", [("get", ARGUMENTS)]),
    (TOOLS_THINKING, f"<think>\nI call\n</think>\n\n{CALL}", "", "I call", [("get", ARGUMENTS)]),
    (TOOLS_THINKING, f"<think>maybe {CALL}</think>ok", "ok", f"maybe {CALL}", []),
    (LLAMA, "plain {text}", "plain {text}", "", []),
    (LLAMA, '{"name": "get", "parameters": {"a": 1}}', "", "", [("get", '{"a": 1}')]),
    (LLAMA, '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": {}}}', "", "", [("a", "{}"), ("b", '{"x": {}}')]),
    (LLAMA, '{"other": 1}', '{"other": 1}', "", []),
]


@pytest.mark.parametrize(("form", "text", "content", "reasoning", "calls"), CASES)
def test_the_parts_of_a_reply_however_it_is_cut(
    form: ReplyForm, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        reply = Reply(form)
        parts = [part for start in range(0, len(text), size) for part in reply.push(text[start : start + size])] + reply.finish()
        assert whole(parts) == (content, reasoning, calls), size
        assert reply.num_calls == (0 if text.endswith('{"a": 1') else len(calls))


PIECES = st.sampled_from(["<", "think>", "/think>", "<think>", "</think>", "<tool_call>", "\n", "a", "{", "}", '"', CALL, "</"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=6), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3)
)


@given(st.lists(PIECES, max_size=12))
def test_any_text_comes_to_the_same_parts_in_any_pieces(pieces: list[str]) -> None:
    for form in (PLAIN, THINKING, TOOLS, TOOLS_THINKING, LLAMA):
        at_once, by_piece = Reply(form), Reply(form)
        text = "".join(pieces)
        together = at_once.push(text) + at_once.finish()
        apart = [part for piece in pieces for part in by_piece.push(piece)] + by_piece.finish()
        assert whole(together) == whole(apart)
        if form is PLAIN:
            assert whole(apart)[0] == text


@given(JSON)
def test_any_arguments_come_whole(value: object) -> None:
    arguments = json.dumps({"a": value})
    reply = Reply(TOOLS)
    parts = [part for char in f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>' for part in reply.push(char)]
    assert whole(parts + reply.finish()) == ("", "", [("f", arguments)])
