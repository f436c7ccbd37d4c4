"""What may stand for a prompt (B27, B29, B34 and table 3C: prompt, chat)."""

from typing import Any

import pytest

from services.common.errors import Code, StatusError
from services.gateway.prompts import (
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    check_prompt_length,
    unknown_message_fields,
    validate_messages,
    validate_prompts,
)
from services.gateway.validator import Limits

LIMITS = Limits(vocab_size=1000, max_model_len=64)
USER = {"role": "user", "content": "hi"}


def refused(check: Any, *args: object, **kwargs: object) -> tuple[str, str]:
    """The field and the message of a refusal."""
    with pytest.raises(StatusError) as caught:
        check(*args, **kwargs)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert len(caught.value.message) < 400
    return caught.value.violations[0].field, caught.value.message


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("hi", ["hi"]), (" ", [" "]), ("\n\t", ["\n\t"]), ("<|im_end|>", ["<|im_end|>"]), ("\0", ["\0"]), (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]), ([0], [[0]]), ([999], [[999]]), ([[1], [2, 3]], [[1], [2, 3]]), ((1, 2), [[1, 2]]), (["x"] * 64, ["x"] * 64),
        ([1] * 63, [[1] * 63]), ("é" * (MAX_PROMPT_BYTES // 2), ["é" * (MAX_PROMPT_BYTES // 2)]),
    ],
)  # fmt: skip
def test_prompts(value: object, prompts: object) -> None:
    assert validate_prompts(value, limits=LIMITS) == prompts


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "prompt"), ("", "prompt"), ([""], "prompt[0]"), ([], "prompt"), ([[]], "prompt[0]"), (["a", ""], "prompt[1]"), ([[1],
        []], "prompt[1]"),
        (5, "prompt"), (True, "prompt"), (1.5, "prompt"), ({}, "prompt"), ({"text": "a"}, "prompt"), (b"abc", "prompt"),
        ([None], "prompt[0]"),
        ([True], "prompt[0]"), ([1, True], "prompt[1]"), ([1.0], "prompt[0]"), ([1.5], "prompt[0]"), ([-1], "prompt[0]"), ([1,
        1000], "prompt[1]"),
        ([2**31], "prompt[0]"), ([10**400], "prompt[0]"), (["a", 5], "prompt[1]"), ([1, "a"], "prompt[1]"), ([[1], "a"], "prompt[1]"),
        ([[1], 2], "prompt[1]"), (["a", ["b"]], "prompt[1]"), ([["a"]], "prompt[0][0]"), ([[[1]]], "prompt[0][0]"), ([{}], "prompt[0]"),
        (["x"] * 65, "prompt"), ([[1]] * 65, "prompt"), ([1] * 64, "prompt"), ([1] * 640, "prompt"), ([[1], [1] * 65], "prompt[1]"),
        ("x" * (MAX_PROMPT_BYTES + 1), "prompt"), ("é" * (MAX_PROMPT_BYTES // 2 + 1), "prompt"), (["x" * 600_000] * 2, "prompt[1]"),
        ("\ud800", "prompt"), (["ok", "a\udfffb"], "prompt[1]"),
    ],
)  # fmt: skip
def test_b27_prompts_that_are_refused(value: object, field: str) -> None:
    assert refused(validate_prompts, value, limits=LIMITS)[0] == field
    assert refused(validate_prompts, value, limits=LIMITS, name="input")[0] == field.replace("prompt", "input")


@pytest.mark.parametrize(
    ("num_tokens", "accepted", "scored"), [(0, False, False), (1, True, True), (63, True, True), (64, False, True), (65, False, False)]
)
def test_b29_around_the_context_length(num_tokens: int, accepted: bool, scored: bool) -> None:
    for allow_no_output, right in ((False, accepted), (True, scored)):
        limits = Limits(1000, 64, allow_no_output=allow_no_output)
        if right:
            check_prompt_length(num_tokens, limits=limits)
        else:
            _, message = refused(check_prompt_length, num_tokens, limits=limits)
            assert num_tokens == 0 or (f"{num_tokens} tokens" in message and "64" in message and "shorten it by" in message)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_roles(role: str) -> None:
    assert validate_messages([{"role": role, "content": "x"}]) == [{"role": role, "content": "x"}]


def test_developer_is_the_system_to_models() -> None:
    assert validate_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


def test_text_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert validate_messages([{"role": "user", "content": parts, "name": "Ann"}]) == [{"role": "user", "content": "ab", "name": "Ann"}]


def test_nulls_of_an_answer_sent_back_are_absence() -> None:
    answer = {"role": "assistant", "content": "x", "tool_calls": None, "function_call": None, "audio": None, "refusal": None, "name": None}
    assert validate_messages([USER, answer])[1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "messages"), ([], "messages"), ("hi", "messages"), ({}, "messages"), (5, "messages"),
        ([USER] * (MAX_MESSAGES + 1), "messages"),
        (["hi"], "messages[0]"), ([None], "messages[0]"), ([[]], "messages[0]"), ([{}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"), ([{"role": "User", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"), ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"), ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"), ([USER, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "content": "", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "name": "a\nb"}], "messages[0].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": "x" * 129}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "x" * (MAX_PROMPT_BYTES + 1)}], "messages"),
        ([{"role": "user", "content": "é" * 300_000}] * 2, "messages"),
    ],
)  # fmt: skip
def test_conversations_that_are_refused(value: object, field: str) -> None:
    assert refused(validate_messages, value)[0] == field


def test_unknown_fields_of_messages_are_named() -> None:
    assert unknown_message_fields([USER | {"mood": 1}, "odd", USER | {"tool_calls": None}]) == ["messages[0].mood"]
    parts = [{"type": "text", "text": "x", "cache_control": {}}, "odd", {"type": "text", "text": "y"}]
    assert unknown_message_fields([USER, {"role": "user", "content": parts}]) == ["messages[1].content[0].cache_control"]
    assert unknown_message_fields(None) == []
