"""64 streams at once, half of them on each face, each with its own seed, stops, logprobs and n: every one as if it were alone."""

import asyncio
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


@dataclass
class Choice:
    """What one choice of a stream came to."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Ask:
    """One request, the same on both faces."""

    number: int

    @property
    def prompt(self) -> str:
        return _PROMPTS[self.number % len(_PROMPTS)]

    @property
    def fields(self) -> dict[str, Any]:
        number = self.number
        fields: dict[str, Any] = {"max_tokens": 6 + number % 5, "temperature": (0.0, 0.7, 1.3)[number % 3], "seed": number}
        if number % 4 == 1:
            fields["stop"] = [" the", ","]
        if number % 5 == 2:
            fields["logprobs"] = 2
        if number % 7 == 3:
            fields["n"] = 2
        if number % 6 == 4:
            fields["top_p"] = 0.8
        return fields


async def _by_http(client: AsyncOpenAI, model: str, ask: Ask) -> list[Choice]:
    choices = [Choice() for _ in range(ask.fields.get("n", 1))]
    async for chunk in await client.completions.create(model=model, prompt=ask.prompt, stream=True, **ask.fields):
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
            return await (_by_http(client, mesh.model, ask) if ask.number % 2 else _by_grpc(stub, mesh, ask))

        alone = [await answer(ask) for ask in asks]
        together = await asyncio.gather(*(answer(ask) for ask in asks))
    for ask, one, other in zip(asks, alone, together, strict=True):
        assert one == other, f"request {ask.number} {ask.fields}: {one} alone, {other} among 64"
        assert all(choice.finish_reason for choice in one)
    mesh.wait_until_idle()
