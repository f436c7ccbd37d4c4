"""X10: fuzzed bodies and messages never end the gateway, never are its fault, and leave nothing behind.

2,000 HTTP bodies here; FOREBAY_FUZZ_CASES=10000 for the long tier (`make fuzz`).
"""

import asyncio
import math
import os
import random
from typing import Any

import grpc
import orjson
import pytest

from forebay.v1 import inference_pb2
from services.common.errors import Code
from tests.fakes import play
from tests.unit.gateway.build import Stack, letters, make_token, stack

NUM_CASES = int(os.environ.get("FOREBAY_FUZZ_CASES", "2000"))
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "speculation",
    "seed",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "echo",
    "stream",
    "stream_options",
    "user",
    "service_tier",
    "strict",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "parameters",
    "reasoning_content",
    "enable_thinking",
    "chat_template_kwargs",
    "functions",
    "response_format",
    "structured_outputs",
    "json_schema",
    "schema",
    "json",
    "regex",
    "choice",
    "grammar",
    "audio",
    "suffix",
    "metadata",
    "store",
    "unheard_of",
]
CLIENT_FAULTS = {400, 401, 404, 405, 413, 415}


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, with a taste for edges."""
    kinds: list[Any] = [
        lambda: rng.choice([None, True, False, 0, -1, 1, 2, 5, 2**31, -(2**31), 2**63, 2**64, 10**40, -(10**40)]),
        lambda: rng.choice([0.0, -0.0, 0.5, 1.5, -1e-9, 1e-300, 1e38, 1e308, 3.0000001]),
        lambda: rng.choice(
            ["", "a", "5", "null", "tiny", "\x00", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\u202e", "é" * 300]
        ),
        lambda: "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randrange(20))),
        lambda: rng.choice(["user", "system", "assistant", "priority", "flex", "auto", "x" * 1000]),
    ]
    if depth < 4:
        kinds += [
            lambda: [value(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {
                rng.choice([*FIELDS, "role", "content", "include_usage", "type", "7", "-1", ""]): value(rng, depth + 1)
                for _ in range(rng.randrange(4))
            },
            lambda: [{"role": value(rng, 4), "content": value(rng, depth + 1)} for _ in range(rng.randrange(3))],
        ]
    return rng.choice(kinds)()


def body(rng: random.Random) -> bytes:
    """A request body: nearly right, wrong, or bytes that were JSON once."""
    fields: dict[str, Any] = {"prompt": "ab", "messages": [{"role": "user", "content": "hi"}]}
    if rng.random() < 0.8:
        fields.pop(rng.choice(list(fields)))
    for _ in range(rng.randrange(4)):
        fields[rng.choice(FIELDS)] = value(rng)
    data = dumps(fields)
    if rng.random() < 0.15:
        data = mangled(rng, data)
    return data


def dumps(fields: dict[str, Any]) -> bytes:
    """JSON with integers of any size, which orjson refuses to write."""
    import json

    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


def mangled(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    pieces = [
        b"",
        b"\xff",
        b"\x00",
        b"NaN",
        b"Infinity",
        b"[" * 3000,
        b'{"a":' * 3000,
        b"\\ud800",
        b'"',
        b",",
        b"1e999",
        b"9" * 5000,
        b"\xed\xa0\x80",
    ]
    return data[:place] + rng.choice(pieces) + data[place + rng.randrange(3) :]


async def test_x10_fuzzed_http_bodies_are_answered_and_leave_nothing() -> None:
    async with stack(play(letters("ok"))) as mesh:
        paths = ["/v1/chat/completions", "/v1/completions", "/v1/completions", "/tokenize"]
        statuses: dict[int, int] = {}

        async def one(number: int) -> None:
            rng = random.Random(number)
            headers = {"content-type": rng.choice(["application/json"] * 9 + ["text/plain"])}
            if rng.random() < 0.1:
                headers[rng.choice(["x-forebay-class", "x-forebay-deadline", "x-forebay-strict", "x-request-id"])] = rng.choice(
                    ["", "1", "x", "batch", "é"]
                )
            data = body(rng)
            answer = await mesh.http.post(rng.choice(paths), content=data, headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 200 or answer.status_code in CLIENT_FAULTS, (
                number,
                data[:500],
                answer.status_code,
                answer.text[:500],
            )
            if answer.status_code != 200:
                error = orjson.loads(answer.content)["error"]
                assert set(error) == {"message", "type", "param", "code"}, (number, error)
                assert error["message"], number
                assert len(answer.content) < 4096, (number, answer.text[:500])
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

        gate = asyncio.Semaphore(16)

        async def gated(number: int) -> None:
            async with gate:
                await one(number)

        await asyncio.gather(*(gated(number) for number in range(NUM_CASES)))
        assert statuses[200] > NUM_CASES / 20  # it isn't all refused at the door
        assert statuses[400] > NUM_CASES / 4
        await still_serves(mesh)


@pytest.mark.parametrize("seed", range(2))
async def test_x10_fuzzed_messages_are_answered_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    good = inference_pb2.GenerateRequest(text="ab", model="tiny")
    good.sampling.max_tokens, good.sampling.temperature, good.sampling.stop[:] = 5, 0.5, ["x"]
    async with stack(play(letters("ok"))) as mesh:
        for number in range(NUM_CASES // 20):
            message = inference_pb2.GenerateRequest.FromString(good.SerializeToString())
            sampling = message.sampling
            name = rng.choice(["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
            setattr(sampling, name, rng.choice([math.nan, math.inf, -math.inf, -0.0, -1.0, 1e38, 0.5, 1.0000001]))
            name = rng.choice(["max_tokens", "min_tokens", "top_k", "n", "logprobs", "prompt_logprobs", "seed"])
            setattr(sampling, name, rng.choice([-(2**31), -2, -1, 0, 1, 2, 17, 2**31 - 1]))
            if rng.random() < 0.3:
                sampling.logit_bias[rng.choice([-1, 0, 256, 257, 2**31 - 1])] = rng.choice([math.nan, 1.0, 101.0])
            if rng.random() < 0.3:
                kind = rng.choice(["json_schema", "regex", "lark"])
                setattr(sampling.grammar, kind, rng.choice(["", "{}", "a+", '{"type": 5}', "[" * 500, 'start: "a"', "(", "\x00"]))
            data = message.SerializeToString()
            if rng.random() < 0.4:
                place = rng.randrange(len(data))
                data = data[:place] + rng.randbytes(rng.randrange(4)) + data[place + rng.randrange(3) :]
            call = mesh.channel.unary_stream("/forebay.v1.InferenceService/Generate")(data, metadata=[("authorization", make_token())])
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), (seed, number, error)  # noqa: PT017  # the message names the case
        await still_serves(mesh)


async def still_serves(mesh: Stack) -> None:
    answer = await mesh.http.post("/v1/completions", json={"prompt": "ab"})
    assert answer.json()["choices"][0]["text"] == "ok"
    await mesh.scheduler.finishes.until(lambda finishes: len(finishes) == len(mesh.workers[0].calls))
    assert mesh.workers[0].num_open == 0
    assert mesh.metric("forebay_requests_in_flight", face="http") == 0
