"""64 streams at once, half on each face, every mix of stops, logprobs, n, a cut distribution and penalties on both: each as if alone."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from openai import AsyncOpenAI

from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.mesh import Mesh

_PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "Q: What is 7 times 8?\nA:",
    "Dear Sir or Madam,",
    "In the year 2050, " * 8,
    "Ein Märchen beginnt:",
)


# One bit of the number each, the last one the face: 2^6 numbers are every mix.
_KINDS: tuple[dict[str, Any], ...] = (
    {"stop": [" the", ","]},
    {"logprobs": 2},
    {"n": 2},
    {"top_p": 0.8, "top_k": 40, "min_p": 0.01},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
)
_NOT_OPENAIS = ("top_k", "min_p", "repetition_penalty")


@dataclass
class Choice:
    """What one choice of a stream came to. HTTP has no token ids."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Ask:
    """One request, the same on both faces."""

    number: int

    @property
    def http(self) -> bool:
        return bool(self.number >> len(_KINDS) & 1)

    @property
    def prompt(self) -> str:
        return random.Random(f"prompt {self.number}").choice(_PROMPTS)

    @property
    def fields(self) -> dict[str, Any]:
        drawn = random.Random(self.number)
        fields = {"max_tokens": drawn.randint(6, 10), "temperature": drawn.choice((0.0, 0.7, 1.3)), "seed": self.number}
        for bit, kind in enumerate(_KINDS):
            if self.number >> bit & 1:
                fields |= kind
        return fields


async def _by_http(client: AsyncOpenAI, model: str, ask: Ask) -> list[Choice]:
    choices = [Choice() for _ in range(ask.fields.get("n", 1))]
    fields = {name: value for name, value in ask.fields.items() if name not in _NOT_OPENAIS}
    extra = {name: value for name, value in ask.fields.items() if name in _NOT_OPENAIS}
    async for chunk in await client.completions.create(model=model, prompt=ask.prompt, stream=True, extra_body=extra, **fields):
        for piece in chunk.choices:
            choice = choices[piece.index]
            choice.text += piece.text
            choice.logprobs += [value for value in (piece.logprobs.token_logprobs or []) if value is not None] if piece.logprobs else []
            choice.finish_reason = piece.finish_reason or choice.finish_reason
    return choices


async def _by_grpc(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", mesh: Mesh, ask: Ask) -> list[Choice]:
    request = inference_pb2.GenerateRequest(model=mesh.model, text=ask.prompt, sampling=types_pb2.SamplingParams(**ask.fields))
    choices = [Choice() for _ in range(ask.fields.get("n", 1))]
    async for event in stub.Generate(request, metadata=mesh.metadata):
        if event.WhichOneof("event") == "delta":
            choice = choices[event.delta.choice_index]
            choice.text += event.delta.text
            choice.token_ids += event.delta.token_ids
            choice.logprobs += [position.chosen.logprob for position in event.delta.logprobs]
        elif event.WhichOneof("event") == "finished":
            for choice, reason in zip(choices, event.finished.reasons, strict=True):
                choice.finish_reason = types_pb2.FinishReason.Name(reason)
    return choices


@pytest.mark.timeout(400)
async def test_64_streams_each_equal_to_itself_alone(mesh: Mesh) -> None:
    asks = [Ask(number) for number in range(64)]
    async with mesh.async_openai() as client, grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async def answer(ask: Ask) -> list[Choice]:
            return await (_by_http(client, mesh.model, ask) if ask.http else _by_grpc(stub, mesh, ask))

        alone = [await answer(ask) for ask in asks]
        together = await asyncio.gather(*(answer(ask) for ask in asks))
    for ask, one, other in zip(asks, alone, together, strict=True):
        assert one == other, f"request {ask.number} {ask.fields}: {one} alone, {other} among 64"
        assert all(choice.finish_reason for choice in one)
        assert all(bool(choice.logprobs) == ("logprobs" in ask.fields) for choice in one)
    # Stop strings were met on both faces.
    ends = [(ask.http, one[0].finish_reason) for ask, one in zip(asks, alone, strict=True) if "stop" in ask.fields]
    assert {(True, "stop"), (False, "FINISH_REASON_STOP")} <= set(ends)
    mesh.wait_until_idle()
