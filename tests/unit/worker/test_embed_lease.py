"""Embed on a worker: every vector once, slots and epochs as any lease's, refusals by name, beside a model that generates."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import torch
from torch import Tensor

from forebay.v1 import scheduler_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.common import rpc
from services.common.errors import Code, from_rpc
from services.worker.engine.encoder import Encoder
from services.worker.engine.encoder_config import Activation, EncoderConfig, Pooling
from services.worker.leases import MAX_WAITING
from services.worker.outbox import Pace
from services.worker.settings import WorkerSettings
from services.worker.wire import Served
from services.worker.worker import Worker
from tests.worker_harness import FAST, ToyRunner, continuation, hear, toy, until

CONFIG = EncoderConfig(1, 4, 1, 8, 100, 16, 2, 1e-12, Activation.GELU, Pooling.MEAN, normalize=False, max_input_len=16)
SERVED = Served(
    "mini@fp32", "feed", "toy", 100, block_size=16 * 8, num_blocks=1 << 20, max_model_len=16, dimensions=4, max_call_tokens=16 * 8
)  # fmt: skip
Request, Response = worker_pb2.WorkerServiceEmbedRequest, worker_pb2.WorkerServiceEmbedResponse


class ToyModel:
    """An input's vector tells its tokens. A test holds it in a step."""

    config = CONFIG

    def __init__(self) -> None:
        self.released = threading.Event()
        self.released.set()
        self.held = threading.Event()
        self.steps: list[list[list[int]]] = []

    def __call__(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        self.steps.append([list(ids) for ids in inputs])
        if not self.released.is_set():
            self.held.set()
            self.released.wait()
        return torch.tensor([vector(ids) for ids in inputs])


def vector(ids: Sequence[int]) -> list[float]:
    return [float("nan") if ids[0] == 99 else float(sum(ids)), float(len(ids)), 3.0, 4.0]


async def rest(call: Any) -> list[str]:
    """The kinds of a stream's events that weren't read yet."""
    kinds = []
    while isinstance(event := await call.read(), Response):
        kinds.append(str(event.WhichOneof("event")))
    return kinds


@dataclass
class Harness:
    worker: Worker
    model: ToyModel
    encoder: Encoder
    stub: Any
    http: httpx.AsyncClient

    def request(self, request_id: str = "r", inputs: Sequence[Sequence[int]] = ((1, 2), (3,)), **changes: Any) -> Request:
        fields: dict[str, Any] = {
            "request_id": request_id, "epoch": 1, "incarnation": self.worker.incarnation, "org": "acme", "model": "mini@fp32",
            "model_version": "feed", "latency_class": types_pb2.LATENCY_CLASS_STANDARD,
        }  # fmt: skip
        return Request(**fields | changes, inputs=[types_pb2.TokenIds(ids=ids) for ids in inputs])

    async def embed(self, request: Request) -> tuple[list[str], dict[int, list[float]]]:
        """The kinds of its events, and the vectors."""
        kinds, vectors = [], dict[int, list[float]]()
        async for event in self.stub.Embed(request):
            kinds.append(event.WhichOneof("event"))
            values = memoryview(event.vectors.values).cast("f").tolist()
            width = len(values) // max(1, len(event.vectors.indexes))
            for row, index in enumerate(event.vectors.indexes):
                assert index not in vectors
                vectors[index] = values[row * width : (row + 1) * width]
        return kinds, vectors

    async def refusal(self, request: Request) -> Any:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.embed(request)
        return from_rpc(caught.value)

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{") and 'model_name="mini@fp32"' in line]
        return float(line.rpartition(" ")[2])

    async def idle(self) -> None:
        await until(lambda: not len(self.worker.leases) and not self.encoder.has_work)
        self.encoder.check_integrity()


@asynccontextmanager
async def serving(
    *, pace: Pace = FAST, max_sequences: int = 8, max_step_tokens: int = 8, with_chat: bool = False
) -> AsyncIterator[Harness]:
    model, runner = ToyModel(), ToyRunner()
    encoder = Encoder(model, max_step_tokens=max_step_tokens, model_version="feed")
    settings = WorkerSettings(model="mini", schedulers="", max_sequences=max_sequences, worker_id="w1")
    worker = Worker([(encoder, SERVED), *([toy(runner)] if with_chat else [])], settings, pace=pace)
    await worker.start()
    try:
        async with rpc.channel(worker.address) as channel, httpx.AsyncClient(base_url=f"http://{worker.internal_address}") as http:
            yield Harness(worker, model, encoder, worker_pb2_grpc.WorkerServiceStub(channel), http)
    finally:
        model.released.set()
        await worker.stop()


async def test_accepted_then_every_vector_once_then_completed() -> None:
    inputs = [[1 + index] * (index % 5 + 1) for index in range(20)]
    async with serving() as mesh:
        kinds, vectors = await mesh.embed(mesh.request(inputs=inputs))
        await mesh.idle()
    assert (kinds[0], kinds[-1]) == ("accepted", "completed")
    assert set(kinds[1:-1]) == {"vectors"}
    assert vectors == {index: vector(ids) for index, ids in enumerate(inputs)}


async def test_dimensions_are_cut_to_length_one() -> None:
    async with serving() as mesh:
        _, vectors = await mesh.embed(mesh.request(inputs=[[3, 1]], dimensions=2))
    assert vectors[0] == pytest.approx([4 / 20**0.5, 2 / 20**0.5])


async def test_it_says_that_it_lives_while_nothing_is_computed() -> None:
    async with serving(pace=Pace(delta_seconds=0.001, ping_seconds=0.02)) as mesh:
        mesh.model.released.clear()
        call = mesh.stub.Embed(mesh.request())
        assert (await call.read()).HasField("accepted")
        assert (await call.read()).ping.waiting
        mesh.model.released.set()
        assert [kind for kind in await rest(call) if kind != "ping"] == ["vectors", "completed"]


async def test_a_call_that_is_left_is_forgotten_by_the_engine() -> None:
    async with serving(max_step_tokens=1) as mesh:
        mesh.model.released.clear()
        call = mesh.stub.Embed(mesh.request(inputs=[[1]] * 50))
        await call.read()
        await asyncio.to_thread(mesh.model.held.wait)
        call.cancel()
        await until(lambda: not len(mesh.worker.leases))
        mesh.model.released.set()
        await mesh.idle()
        assert len(mesh.model.steps) < 50


async def test_a_vector_that_is_no_number_fails_its_request_alone() -> None:
    async with serving() as mesh:
        error = await mesh.refusal(mesh.request(inputs=[[1], [99]]))
        assert (error.code, error.reason) == (Code.INTERNAL, "SEQUENCE_FAILED")
        _, vectors = await mesh.embed(mesh.request("s", [[1]]))
        assert vectors == {0: vector([1])}
        await mesh.idle()


REFUSED: dict[str, tuple[dict[str, Any], Code, str]] = {
    "incarnation": ({"incarnation": "old"}, Code.FAILED_PRECONDITION, "earlier start"),
    "model": ({"model": "other@fp32"}, Code.NOT_FOUND, "isn't here"),
    "version": ({"model_version": "beef"}, Code.FAILED_PRECONDITION, "this worker has 'feed'"),
    "id": ({"request_id": ""}, Code.INVALID_ARGUMENT, "request_id must have 1 to"),
    "epoch": ({"epoch": 0}, Code.INVALID_ARGUMENT, "epoch 0 must be at least 1"),
    "class": ({"latency_class": 0}, Code.INVALID_ARGUMENT, "latency_class 0"),
    "dimensions": ({"dimensions": 5}, Code.INVALID_ARGUMENT, "dimensions 5 must be from 0 to 4"),
    "none": ({"inputs": []}, Code.INVALID_ARGUMENT, "inputs has 0 entries"),
    "many": ({"inputs": [[1]] * 2049}, Code.INVALID_ARGUMENT, "inputs has 2049 entries"),
    "empty": ({"inputs": [[1], []]}, Code.INVALID_ARGUMENT, "inputs[1] has 0 tokens"),
    "long": ({"inputs": [[1] * 17]}, Code.INVALID_ARGUMENT, "inputs[0] has 17 tokens; it must have 1 to 16"),
    "ids": ({"inputs": [[100]]}, Code.INVALID_ARGUMENT, "inputs[0] holds 100 .. 100"),
    "negative": ({"inputs": [[-1]]}, Code.INVALID_ARGUMENT, "ids must be from 0 to 99"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_for_this_engine_is_refused_by_name(name: str) -> None:
    changes, code, words = REFUSED[name]
    async with serving() as mesh:
        error = await mesh.refusal(mesh.request(**changes))
        assert mesh.model.steps == []
    assert error.code is code
    assert words in error.message


async def test_a_model_is_asked_for_what_it_does_alone() -> None:
    async with serving(with_chat=True) as mesh:
        error = await mesh.refusal(mesh.request(model="toy@fp32", model_version="0123456789abcdef"))
        assert "'toy@fp32' generates tokens: use Generate" in error.message
        generate = worker_pb2.WorkerServiceGenerateRequest(incarnation=mesh.worker.incarnation, model="mini@fp32", model_version="feed")
        with pytest.raises(grpc.aio.AioRpcError, match="'mini@fp32' makes vectors: use Embed"):
            await hear(mesh.stub.Generate(generate))


async def test_an_epoch_that_is_over_comes_no_more() -> None:
    async with serving() as mesh:
        await mesh.embed(mesh.request(epoch=2))
        assert (await mesh.refusal(mesh.request(epoch=2))).reason == "STALE_EPOCH"
        mesh.worker.leases.revoke([scheduler_pb2.LeaseProgress(request_id="r", epoch=3)])
        assert (await mesh.refusal(mesh.request(epoch=3))).reason == "STALE_EPOCH"
        await mesh.embed(mesh.request(epoch=4))


async def test_a_call_holds_a_slot_and_no_cache() -> None:
    async with serving(max_sequences=1) as mesh:
        mesh.model.released.clear()
        calls = [mesh.stub.Embed(mesh.request(str(number))) for number in range(1 + MAX_WAITING)]
        for call in calls:
            await call.read()
        heartbeat = mesh.worker.heartbeat()
        assert sorted((lease.request_id, lease.num_blocks) for lease in heartbeat.leases) == [("0", 0), ("1", 0), ("2", 0)]
        assert [(usage.num_slots, usage.num_blocks) for usage in heartbeat.class_usage] == [(3, 0)]
        error = await mesh.refusal(mesh.request("one more"))
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "NO_ROOM")
        mesh.model.released.set()
        for call in calls:
            assert (await rest(call))[-1] == "completed"
        assert mesh.worker.heartbeat().class_usage == []


async def test_a_draining_worker_ends_what_it_has_and_takes_nothing_new() -> None:
    async with serving() as mesh:
        mesh.model.released.clear()
        call = mesh.stub.Embed(mesh.request())
        await call.read()
        drained = asyncio.create_task(mesh.worker.drain(5.0))
        await until(lambda: mesh.worker.leases.draining)
        assert (await mesh.refusal(mesh.request("late"))).code is Code.UNAVAILABLE
        mesh.model.released.set()
        assert (await rest(call))[-1] == "completed"
        await drained


async def test_the_deadline_ends_it() -> None:
    async with serving() as mesh:
        mesh.model.released.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in mesh.stub.Embed(mesh.request(), timeout=0.1):
                pass
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: not len(mesh.worker.leases))


async def test_it_registers_what_a_call_may_bring_and_that_no_cache_holds_it() -> None:
    async with serving(with_chat=True) as mesh:
        mini, chat = mesh.worker.node.register.models
    assert (mini.model, mini.max_model_len, mini.max_call_tokens) == ("mini@fp32", 16, 128)
    assert mini.num_blocks * mini.block_size >= mini.max_call_tokens
    assert chat.max_call_tokens == 0


async def test_metrics_count_requests_inputs_and_tokens() -> None:
    async with serving() as mesh:
        await mesh.embed(mesh.request(inputs=[[1, 2], [3]]))
        await mesh.idle()
        assert await mesh.metric("forebay_worker_embedded_inputs_total") == 2
        assert await mesh.metric("forebay_worker_embedded_tokens_total") == 3
        assert await mesh.metric("forebay_worker_embed_running") == 0
        assert await mesh.metric("vllm:request_prompt_tokens_sum") == 3
        assert await mesh.metric("vllm:e2e_request_latency_seconds_count") == 1


async def test_vectors_and_tokens_of_one_worker_alternate() -> None:
    async with serving(with_chat=True, max_step_tokens=1) as mesh:
        chat = worker_pb2.WorkerServiceGenerateRequest(
            request_id="c", epoch=1, incarnation=mesh.worker.incarnation, org="acme", model="toy@fp32", model_version="0123456789abcdef",
            latency_class=types_pb2.LATENCY_CLASS_STANDARD, cache_salt=b"s" * 32, prompt_token_ids=[1, 2, 3],
            sampling=types_pb2.SamplingParams(max_tokens=40, temperature=0, seed=1, n=1),
        )  # fmt: skip
        (_, vectors), heard = await asyncio.gather(mesh.embed(mesh.request(inputs=[[1]] * 60)), hear(mesh.stub.Generate(chat)))
    assert vectors == {index: vector([1]) for index in range(60)}
    assert heard.tokens() == continuation([1, 2, 3], 40)
