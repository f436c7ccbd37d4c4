"""Table 3C through both faces: every refused case is refused with the same words, every accepted one reaches the worker alike."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import Code, from_rpc
from tests.fakes import play
from tests.unit.gateway.build import Stack, letters, make_token, stack
from tests.unit.gateway.test_validator import ACCEPTED, CAP, CONTEXT, REFUSED_CASES, VOCAB

ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
]
_FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name


def as_json(name: str, value: Any) -> bytes | None:
    """The completions body of a case; None for what JSON or this endpoint has no word for."""
    if name in ("prompt_logprobs", "grammar"):
        return None
    try:
        return json.dumps({"prompt": "a", name: value}).encode()
    except TypeError:
        return None


def as_message(name: str, value: Any) -> inference_pb2.GenerateRequest | None:
    """The same case as a message; None for what the field can't hold, or would turn into something else."""
    descriptor = _FIELDS.get(name)
    if descriptor is None or value is None or value in ([], {}, ()):
        return None
    if descriptor.is_repeated and not isinstance(value, dict if name == "logit_bias" else list | tuple):
        return None
    scalars = list(value) + list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool) is not (descriptor.type == FieldDescriptor.TYPE_BOOL) for item in scalars):
        return None
    # A message takes the last of several kinds, and 1 for true.
    if name == "grammar" and isinstance(value, dict) and (len(value) > 1 or "json_object" in value):
        return None
    try:
        message = inference_pb2.GenerateRequest(text="a", sampling=types_pb2.SamplingParams(**{name: value}))
    except (TypeError, ValueError, OverflowError):
        return None
    return message if message.sampling.ListFields() else None


def table_stack(*scripts: Any) -> Any:
    return stack(*scripts, vocab_size=VOCAB, max_model_len=CONTEXT, context_len=CONTEXT, max_tokens_cap=CAP)


async def grpc_refusal(mesh: Stack, message: inference_pb2.GenerateRequest) -> tuple[str, str]:
    """Field and words of an INVALID_ARGUMENT."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await mesh.inference.Generate(message, metadata=[("authorization", make_token())]).read()
    error = from_rpc(failure.value)
    assert error.code is Code.INVALID_ARGUMENT, (message, error)
    return error.violations[0].field, error.message


async def test_refused_cases_are_refused_alike() -> None:
    num_http = num_grpc = num_both = 0
    async with table_stack(play(letters("x"))) as mesh:

        async def refused(name: str, value: Any) -> None:
            nonlocal num_http, num_grpc, num_both
            body, message = as_json(name, value), as_message(name, value)
            http_words = grpc_words = None
            if body is not None:
                num_http += 1
                answer = await mesh.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 400, (name, value, answer.text)
                error = answer.json()["error"]
                if error["code"] != "invalid_json":
                    assert error["param"].split("[")[0] == name, (name, value, error)
                    http_words = error["message"]
            if message is not None:
                num_grpc += 1
                field, grpc_words = await grpc_refusal(mesh, message)
                assert field.split("[")[0] == name, (name, value, grpc_words)
            if http_words and grpc_words and _FIELDS[name].type != FieldDescriptor.TYPE_FLOAT and "bias" not in name:
                num_both += 1
                assert http_words == grpc_words

        for start in range(0, len(REFUSED_CASES), 32):
            await asyncio.gather(*(refused(name, value) for name, value in REFUSED_CASES[start : start + 32]))
        assert not mesh.scheduler.places
        assert (await mesh.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert num_http > 250
    assert num_grpc > 90
    assert num_both > 20


async def test_accepted_cases_reach_the_worker_alike() -> None:
    async with table_stack(play(letters("x"))) as mesh:
        for name, value, _ in ACCEPTED:
            body, message = as_json(name, value), as_message(name, value)
            seen = []
            if body is not None:
                answer = await mesh.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 200, (name, value, answer.text)
                seen.append(mesh.workers[0].calls[-1].request.sampling)
            if message is not None:
                async for _event in mesh.inference.Generate(message, metadata=[("authorization", make_token())]):
                    pass
                seen.append(mesh.workers[0].calls[-1].request.sampling)
            for sampling in seen:
                if name != "seed":
                    sampling.ClearField("seed")  # drawn anew for each
            assert seen[1:] == seen[:-1], (name, value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages"),
        ([{"role": "boss", "content": "x"}], "role"),
        ([{"role": "", "content": "x"}], "role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "roles must alternate"),
    ],
)
async def test_b34_conversations_are_refused_alike(messages: list[dict[str, str]], words: str) -> None:
    async with table_stack(play(letters("x"))) as mesh:
        answer = await mesh.http.post("/v1/chat/completions", json={"messages": messages})
        request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(**message) for message in messages])
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await mesh.inference.Chat(request, metadata=[("authorization", make_token())]).read()
        error = from_rpc(failure.value)
    assert (answer.status_code, error.code) == (400, Code.INVALID_ARGUMENT)
    assert answer.json()["error"]["message"] == error.message
    assert answer.json()["error"]["param"] == error.violations[0].field
    assert words in error.message or words in error.violations[0].field


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "at #/properties/a/not: the keyword 'not' is not offered"),
        ({"type": "string", "pattern": "(?=a)"}, "can't be enforced: regex parse error: (?=a) error: look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "can't be enforced: Unsatisfiable schema: minimum (5) is greater"),
        ({"$ref": "#"}, "can't be enforced: nothing fulfils it"),
        ({"type": "string", "format": "iri"}, "at #/format: this format is not enforced"),
    ],
)  # fmt: skip
async def test_schemas_are_refused_alike_before_anything_is_placed(schema: dict[str, Any], words: str) -> None:
    async with table_stack(play(letters("x"))) as mesh:
        forms = [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json": json.dumps(schema)}},
        ]
        for body in forms:
            for path, prompt in ENDPOINTS:
                answer = await mesh.http.post(path, json=prompt | body)
                name = next(iter(body))
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
                assert answer.json()["error"]["message"].startswith(f"{name} {words}")
        grammar = types_pb2.Grammar(json_schema=json.dumps(schema))
        message = inference_pb2.GenerateRequest(text="a", sampling=types_pb2.SamplingParams(grammar=grammar))
        field, said = await grpc_refusal(mesh, message)
        assert field == "grammar"
        assert said.startswith(f"grammar {words}")
        assert not mesh.scheduler.places


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, types_pb2.Grammar(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}}}},
            types_pb2.Grammar(json_schema='{"type":"null"}'),
        ),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, types_pb2.Grammar(json_schema='{"type":"null"}')),
        ({"structured_outputs": {"json_object": True}}, types_pb2.Grammar(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, types_pb2.Grammar(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "é"]}}, types_pb2.Grammar(choice=types_pb2.Choices(choices=["a", "é"]))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, types_pb2.Grammar(lark='start: "a"')),
    ],
)
async def test_grammars_reach_the_worker_alike(body: dict[str, Any], grammar: types_pb2.Grammar | None) -> None:
    async with table_stack(play(letters("x"))) as mesh:
        for path, prompt in ENDPOINTS:
            answer = await mesh.http.post(path, json=prompt | body)
            assert answer.status_code == 200, answer.text
            assert "x-forebay-ignored" not in answer.headers
            got = mesh.workers[0].calls[-1].request.sampling
            assert (got.grammar if got.HasField("grammar") else None) == grammar
        async for _ in mesh.inference.Generate(
            inference_pb2.GenerateRequest(text="a", sampling=types_pb2.SamplingParams(grammar=grammar)),
            metadata=[("authorization", make_token())],
        ):
            pass
        got = mesh.workers[0].calls[-1].request.sampling
        assert (got.grammar if got.HasField("grammar") else None) == grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "lax": 1}}}, "response_format.json_schema.lax"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ],
)
async def test_forms_of_grammars_that_are_none(body: dict[str, Any], param: str) -> None:
    async with table_stack(play(letters("x"))) as mesh:
        for path, prompt in ENDPOINTS:
            answer = await mesh.http.post(path, json=prompt | body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_an_output_that_its_grammar_ended_keeps_its_last_token() -> None:
    async def script(call: Any) -> None:
        await call.accept()
        await call.tokens(letters("{}"), reason=types_pb2.FINISH_REASON_STOP, grammar_complete=True)
        await call.complete()

    async with table_stack(script) as mesh:
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a", "response_format": {"type": "json_object"}})
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("{}", "stop")
