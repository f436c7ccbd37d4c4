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

_FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name


def as_json(name: str, value: Any) -> bytes | None:
    """The completions body of a case; None for what JSON or this endpoint has no word for."""
    if name == "prompt_logprobs":
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
