"""Tools, their choice and thinking, through both faces: honoured or refused by name, and streamed as OpenAI has it."""

import json
from typing import Any

import grpc
import pytest

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import StatusError, from_rpc
from services.gateway.text.template import ChatTemplate
from services.gateway.tools import validate_tools
from services.text.tokenizer import SpecialTokens
from tests.fakes import STOP, play
from tests.unit.gateway.build import EOS, Stack, events_of, letters, make_token, stack

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CALLS = (
    'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THINKING = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    SpecialTokens(),
)
PATH = "/v1/chat/completions"


def said(text: str) -> Any:
    return play([*letters(text), EOS], reason=STOP)


# --- what is refused

BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "frob": 1}}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": 5}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters"),
    ({"tools": [NOW, {"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}]}, "tools[1].function.parameters"),
    ({"tools": [NOW, NOW]}, "tools[1]"),
    ({"tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 70_000}}]}, "tools"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "now"}, "mode": 1}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": [NOW], "structured_outputs": {"grammar": "start: /x/"}}, "structured_outputs"),
    ({"tools": [NOW], "tool_choice": "required", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [NOW], "ignore_eos": True}, "ignore_eos"),
    ({"enable_thinking": True}, "enable_thinking"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
    ({"chat_template_kwargs": {"frob": 1}}, "chat_template_kwargs.frob"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "enable_thinking"),
    ({"functions": [{}]}, "functions"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [NOW]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 5}]}, "messages[0].reasoning_content"),
]


async def test_what_can_not_be_honoured_is_refused_by_name() -> None:
    async with stack(said("x")) as mesh:
        for fields, param in BAD:
            answer = await mesh.http.post(PATH, json=CHAT | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (fields, answer.text)
        assert not mesh.workers[0].calls


async def test_the_fields_of_chats_are_refused_on_completions() -> None:
    async with stack(said("x")) as mesh:
        for name, value in [("tools", [NOW]), ("tool_choice", "none"), ("enable_thinking", True), ("chat_template_kwargs", {})]:
            answer = await mesh.http.post("/v1/completions", json={"prompt": "a", name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_template_whose_form_is_not_known_has_no_tools() -> None:
    async with stack(said("x"), template=ChatTemplate("{% if tools %}[TOOLS]{% endif %}x", SpecialTokens())) as mesh:
        answer = await mesh.http.post(PATH, json=CHAT | {"tools": [NOW]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert (await mesh.http.post(PATH, json=CHAT | {"tools": [NOW], "tool_choice": "none"})).status_code == 200


async def test_an_answer_that_could_be_taken_for_a_call_is_refused_beside_tools() -> None:
    """Llama's calls are bare JSON. Where a call is required, or none can be, there is nothing to take for the other."""
    llama = ChatTemplate("{% if tools %}<|python_tag|>{% endif %}x", SpecialTokens())
    body = CHAT | {"tools": [NOW], "response_format": {"type": "json_object"}}
    async with stack(said("{}"), template=llama) as mesh:
        answer = await mesh.http.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
        for choice in ("required", "none"):
            assert (await mesh.http.post(PATH, json=body | {"tool_choice": choice})).status_code == 200


def test_none_is_no_tools() -> None:
    assert validate_tools(None, None, None) is None
    assert validate_tools([], "none", True) is None
    assert validate_tools([NOW], "none", None) is None


# --- what comes


async def test_calls_in_a_whole_answer() -> None:
    async with stack(said(CALLS)) as mesh:
        answer = await mesh.http.post(PATH, json=CHAT | {"tools": [WEATHER, NOW]})
        (choice,) = answer.json()["choices"]
        grammar = mesh.workers[0].calls[-1].request.sampling.grammar
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    assert "tag[lazy]" in grammar.lark


async def test_calls_in_a_stream_name_first_then_arguments_in_pieces() -> None:
    async with stack(said(CALLS)) as mesh:
        chunks = await events_of(mesh, PATH, CHAT | {"tools": [WEATHER, NOW]})
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0]["function"] == {"name": "weather", "arguments": ""}
    assert pieces[0]["id"]
    assert pieces[0]["type"] == "function"
    by_index = {index: "".join(p["function"]["arguments"] for p in pieces if p["index"] == index) for index in (0, 1)}
    assert by_index == {0: '{"city": "Oslo"}', 1: "{}"}
    assert sum("id" in piece for piece in pieces) == 2
    assert len([piece for piece in pieces if piece["index"] == 0]) > 3
    assert [c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]] == ["tool_calls"]
    assert "tool_call>" not in "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(
    ("text", "content", "names", "reason"),
    [
        ('{"text": "<tool_call>"}', '{"text": "<tool_call>"}', [], "stop"),
        (CALLS.partition("\n")[2], None, ["weather", "now"], "tool_calls"),
    ],
)
async def test_beside_a_format_it_is_an_answer_or_calls(text: str, content: str | None, names: list[str], reason: str) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    body = CHAT | {"tools": [WEATHER, NOW], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    async with stack(said(text)) as mesh:
        (choice,) = (await mesh.http.post(PATH, json=body)).json()["choices"]
        chunks = await events_of(mesh, PATH, body)
        grammars = [call.request.sampling.grammar.lark for call in mesh.workers[0].calls]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls", [])] == names
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == (content or "")
    assert all("start: answer | " in grammar for grammar in grammars)


async def chat_events(mesh: Stack, **fields: Any) -> list[inference_pb2.ChatResponse]:
    request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")], **fields)
    return [event async for event in mesh.inference.Chat(request, metadata=[("authorization", make_token())])]


TOOLS_MESSAGE = [inference_pb2.Tool(name="weather", description="x", parameters=json.dumps(PARAMETERS)), inference_pb2.Tool(name="now")]


async def test_calls_over_grpc() -> None:
    async with stack(said(CALLS)) as mesh:
        events = await chat_events(mesh, tools=TOOLS_MESSAGE)
        by_http = await mesh.http.post(PATH, json=CHAT | {"tools": [WEATHER | {}, NOW]})
        assert by_http.status_code == 200
        grpc_grammar, http_grammar = (call.request.sampling.grammar for call in mesh.workers[0].calls)
    pieces = [piece for event in events for piece in event.delta.tool_calls]
    assert [piece.name for piece in pieces if piece.name] == ["weather", "now"]
    assert "".join(piece.arguments for piece in pieces if piece.index == 0) == '{"city": "Oslo"}'
    assert "".join(event.delta.text for event in events) == "Well.\n"
    assert events[-1].finished.reasons == [types_pb2.FINISH_REASON_TOOL_CALLS]
    assert grpc_grammar == http_grammar


@pytest.mark.parametrize(
    ("http", "fields"),
    [
        ({"tool_choice": "required"}, {"tool_mode": inference_pb2.TOOL_MODE_REQUIRED}),
        ({"tool_choice": NAMED}, {"tool_name": "now"}),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, {"tool_mode": inference_pb2.TOOL_MODE_AUTO, "parallel_tool_calls": False}),
        ({"tool_choice": "none"}, {"tool_mode": inference_pb2.TOOL_MODE_NONE}),
        (
            {"tool_choice": "auto", "response_format": {"type": "json_object"}},
            {"sampling": types_pb2.SamplingParams(grammar=types_pb2.Grammar(json_object=True))},
        ),
    ],
)
async def test_choices_of_tools_are_the_same_on_both_faces(http: dict[str, Any], fields: dict[str, Any]) -> None:
    async with stack(said("x")) as mesh:
        await chat_events(mesh, tools=TOOLS_MESSAGE, **fields)
        weather = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": PARAMETERS}}
        await mesh.http.post(PATH, json=CHAT | {"tools": [weather, NOW]} | http)
        first, second = (call.request for call in mesh.workers[0].calls)
    assert first.sampling.grammar == second.sampling.grammar
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling.HasField("grammar") is (http["tool_choice"] != "none")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_mode": 9}, "tool_mode"),
        ({"tools": TOOLS_MESSAGE, "tool_name": "now", "tool_mode": inference_pb2.TOOL_MODE_AUTO}, "tool_name"),
        ({"tools": [inference_pb2.Tool(name="a", parameters="{")]}, "tools[0].parameters"),
        ({"tools": [inference_pb2.Tool(name="a", parameters='{"frob": 1}')]}, "tools[0].function.parameters"),
        ({"enable_thinking": True}, "enable_thinking"),
    ],
)
async def test_what_grpc_refuses(fields: dict[str, Any], param: str) -> None:
    async with stack(said("x")) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat_events(mesh, **fields)
        error: StatusError = from_rpc(caught.value)
        assert error.violations[0].field == param


async def test_calls_and_results_come_back_in_the_conversation() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    async with stack(said("Noon.")) as mesh:
        answer = await mesh.http.post(PATH, json={"messages": messages, "tools": [NOW]})
        assert answer.json()["choices"][0]["message"]["content"] == "Noon."
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        prompt = bytes(mesh.workers[0].calls[0].request.prompt_token_ids).decode()
        request = inference_pb2.ChatRequest(
            messages=[
                inference_pb2.ChatMessage(role="user", content="Time?"),
                inference_pb2.ChatMessage(
                    role="assistant", tool_calls=[inference_pb2.ToolCall(id="call_1", name="now", arguments='{"zone": "CET"}')]
                ),
                inference_pb2.ChatMessage(role="tool", content="noon", tool_call_id="call_1"),
            ],
            tools=[inference_pb2.Tool(name="now")],
        )
        async for _ in mesh.inference.Chat(request, metadata=[("authorization", make_token())]):
            pass
        assert bytes(mesh.workers[0].calls[1].request.prompt_token_ids).decode() == prompt
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>' in prompt
    assert "<tool_response>\nnoon\n</tool_response>" in prompt


# --- thinking


async def test_thoughts_are_told_from_the_answer() -> None:
    async with stack(said("<think>\nhm <b>\n</think>\n\nYes."), template=THINKING) as mesh:
        answer = (await mesh.http.post(PATH, json=CHAT)).json()["choices"][0]
        chunks = await events_of(mesh, PATH, CHAT)
        events = await chat_events(mesh)
    assert (answer["message"]["reasoning_content"], answer["message"]["content"]) == ("hm <b>", "Yes.")
    assert answer["finish_reason"] == "stop"
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm <b>"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert "".join(event.delta.reasoning for event in events) == "hm <b>"
    assert "".join(event.delta.text for event in events) == "Yes."


@pytest.mark.parametrize("fields", [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_thinking_is_switched_off_in_the_prompt(fields: dict[str, Any]) -> None:
    async with stack(said("Yes."), template=THINKING) as mesh:
        await mesh.http.post(PATH, json=CHAT)
        await mesh.http.post(PATH, json=CHAT | fields)
        await chat_events(mesh, enable_thinking=False)
        prompts = [bytes(call.request.prompt_token_ids).decode() for call in mesh.workers[0].calls]
    assert prompts == ["hi", "hi<think></think>", "hi<think></think>"]


async def test_what_forces_the_form_of_a_reply_leaves_no_room_for_thoughts() -> None:
    a_format: dict[str, Any] = {"response_format": {"type": "json_object"}}
    forced: list[dict[str, Any]] = [a_format, {"tools": [NOW], "tool_choice": "required"}, {"tools": [NOW], **a_format}]
    async with stack(said("{}"), template=THINKING) as mesh:
        for fields in forced:
            assert (await mesh.http.post(PATH, json=CHAT | fields)).status_code == 200
            assert bytes(mesh.workers[0].calls[-1].request.prompt_token_ids).endswith(b"<think></think>")
            answer = await mesh.http.post(PATH, json=CHAT | fields | {"enable_thinking": True})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "enable_thinking")
        assert (await mesh.http.post(PATH, json=CHAT | {"tools": [NOW], "enable_thinking": True})).status_code == 200


async def test_a_reply_that_the_prompt_began_to_think() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n", SpecialTokens())
    async with stack(said("so\n</think>\n\nYes."), template=template) as mesh:
        message = (await mesh.http.post(PATH, json=CHAT)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "Yes.")


# --- counting

SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tools": [NOW]}, {"tools": [inference_pb2.Tool(name="now")]}),
    ({"tools": [NOW], "tool_choice": "none"}, {"tools": [inference_pb2.Tool(name="now")], "tool_mode": inference_pb2.TOOL_MODE_NONE}),
    ({"tools": [NOW], "tool_choice": NAMED}, {"tools": [inference_pb2.Tool(name="now")], "tool_name": "now"}),
    ({"enable_thinking": False}, {"enable_thinking": False}),
    ({"response_format": {"type": "json_object"}}, {"grammar": types_pb2.Grammar(json_object=True)}),
]


@pytest.mark.parametrize(("http", "fields"), SHAPES)
async def test_a_count_is_of_the_prompt_that_a_generation_has(http: dict[str, Any], fields: dict[str, Any]) -> None:
    """Tools, their choice, thinking and what leaves no room for it: on both faces."""
    async with stack(said("{}"), template=THINKING) as mesh:
        assert (await mesh.http.post(PATH, json=CHAT | http)).status_code == 200
        prompt = list(mesh.workers[0].calls[0].request.prompt_token_ids)
        counted = (await mesh.http.post("/tokenize", json=CHAT | http)).json()
        conversation = inference_pb2.Conversation(messages=[inference_pb2.ChatMessage(role="user", content="hi")], **fields)
        by_grpc = await mesh.inference.CountTokens(
            inference_pb2.CountTokensRequest(conversation=conversation), metadata=[("authorization", make_token())]
        )
    assert counted["tokens"] == list(by_grpc.token_ids) == prompt
    assert counted["count"] == by_grpc.num_tokens == len(prompt)


async def test_a_count_refuses_what_a_generation_would() -> None:
    async with stack(said("x")) as mesh:
        for fields in ({"tools": 5}, {"tools": [NOW], "tool_choice": "always"}, {"enable_thinking": True}, {"response_format": 5}):
            answer = await mesh.http.post("/tokenize", json=CHAT | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(fields)[-1])
        answer = await mesh.http.post("/tokenize", json={"prompt": "hi", "tools": [NOW]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
