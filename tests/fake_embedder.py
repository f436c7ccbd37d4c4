"""An in-process stand-in for a worker that embeds, on real gRPC, driven by a test's script: vectors that tell their inputs."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from forebay.v1 import types_pb2, worker_pb2
from tests.fakes import FakeWorker, Journal, play

DIMENSIONS = 4
MAX_INPUT_LEN = 16


def vector(ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[float]:
    """What the fake makes of an input: its sum, its length, and constants; all of them float32s."""
    return [float(sum(ids)), float(len(ids)), 0.5, -0.25][:dimensions]


@dataclass
class EmbedCall:
    """One Embed call as a script drives it: accept, vectors, complete."""

    request: worker_pb2.WorkerServiceEmbedRequest
    context: Any

    @property
    def inputs(self) -> list[list[int]]:
        return [list(entry.ids) for entry in self.request.inputs]

    async def accept(self) -> None:
        await self.context.write(worker_pb2.WorkerServiceEmbedResponse(accepted=worker_pb2.Accepted(fingerprint="fp32-test")))

    async def ping(self) -> None:
        await self.context.write(worker_pb2.WorkerServiceEmbedResponse(ping=worker_pb2.Ping(waiting=True)))

    async def vectors(self, indexes: Iterable[int]) -> None:
        """Of these inputs, in one message."""
        dimensions = self.request.dimensions or DIMENSIONS
        indexes = list(indexes)
        values = b"".join(struct.pack(f"<{dimensions}f", *vector(self.inputs[index], dimensions)) for index in indexes)
        await self.context.write(worker_pb2.WorkerServiceEmbedResponse(vectors=worker_pb2.Vectors(indexes=indexes, values=values)))

    async def complete(self) -> None:
        usage = types_pb2.Usage(prompt_tokens=sum(map(len, self.inputs)))
        await self.context.write(worker_pb2.WorkerServiceEmbedResponse(completed=worker_pb2.Completed(usage=usage)))

    async def fail(self, code: grpc.StatusCode, message: str = "scripted") -> None:
        await self.context.abort(code, message)


EmbedScript = Callable[[EmbedCall], Awaitable[None]]


async def embed_all(call: EmbedCall) -> None:
    """Everything, the last input first, two to a message."""
    await call.accept()
    order = list(reversed(range(len(call.inputs))))
    for start in range(0, len(order), 2):
        await call.vectors(order[start : start + 2])
    await call.complete()


async def embed_nothing(call: EmbedCall) -> None:
    """Takes the request up, and says no more."""
    await call.accept()
    await asyncio.Event().wait()


class FakeEmbedder(FakeWorker):
    """A worker that makes vectors alone."""

    def __init__(self, script: EmbedScript = embed_all, worker_id: str = "w1", models: Sequence[str] = ("tiny@fp32",)) -> None:
        super().__init__(play([]), worker_id, models, MAX_INPUT_LEN)
        self.embed_script = script
        self.embed_calls: Journal[EmbedCall] = Journal()

    async def Embed(self, request: worker_pb2.WorkerServiceEmbedRequest, context: Any) -> None:
        call = EmbedCall(request, context)
        self.embed_calls.append(call)
        self.num_open += 1
        try:
            await self.embed_script(call)
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter where the end meets a write
            self.cancelled.append(request.request_id)
            raise asyncio.CancelledError from None
        finally:
            self.num_open -= 1
