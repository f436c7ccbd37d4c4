"""Requests that end before their time, over both faces and in every state: their blocks are free at once, and nobody else notices."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from forebay.v1 import admin_pb2, inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.mesh import Mesh, Operator, is_idle, living

FREE_SECONDS = 10.0
"""The promise is 0.5 s, asserted where nothing else runs (tests/unit/worker/test_server.py). Here, beside whatever the machine does, a
bound far below what the request itself would take."""

NUM_CANCELS = int(os.environ.get("FOREBAY_CANCELS", "200"))
NUM_TOKENS = 3000
"""Far more than a fast machine makes before it is told to stop."""
_AT_ONCE = 8
_LAST_CANCEL_SECONDS = 0.05

Fleet = admin_pb2.GetFleetResponse
Ask = Callable[[Mesh, str], Awaitable[object]]


@pytest.fixture
def operator(mesh: Mesh) -> Iterator[Operator]:
    with mesh.operator() as operator:
        operator.wait_until(is_idle, "the mesh is idle before the test")
        yield operator


@pytest.fixture(autouse=True)
def nothing_died(mesh: Mesh) -> Iterator[None]:
    yield
    assert living(mesh.processes) == mesh.processes


# -- four ways to go


async def _grpc(mesh: Mesh, prompt: str, *, timeout: float | None = None, n: int = 1) -> None:
    sampling = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=n)
    request = inference_pb2.GenerateRequest(text=prompt, sampling=sampling)
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=mesh.metadata, timeout=timeout):
            pass


async def _grpc_with_deadline(mesh: Mesh, prompt: str) -> None:
    """16 choices: one alone might be through before its deadline."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _grpc(mesh, prompt, timeout=6, n=16)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def _http(mesh: Mesh, prompt: str, *, stream: bool = False) -> None:
    """Cancelled, it closes its connection."""
    body = {"model": mesh.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": stream}
    client = httpx.AsyncClient(headers={"Authorization": f"Bearer {mesh.token}"}, timeout=60, trust_env=False)
    async with client as http, http.stream("POST", f"{mesh.http_base_url}/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def _http_stream(mesh: Mesh, prompt: str) -> None:
    await _http(mesh, prompt, stream=True)


# -- three states, as an operator sees them


def _queued(fleet: Fleet) -> bool:
    return bool(fleet.queues)


def _in_prefill(fleet: Fleet) -> bool:
    return any(lease.num_blocks and not lease.num_output_tokens for worker in fleet.workers for lease in worker.heartbeat.leases)


def _in_decode(fleet: Fleet) -> bool:
    return any(lease.num_output_tokens for worker in fleet.workers for lease in worker.heartbeat.leases)


async def _reach(operator: Operator, state: Callable[[Fleet], bool], what: str, seconds: float = 20) -> None:
    await asyncio.to_thread(operator.wait_until, state, what, seconds)


async def _leave(task: "asyncio.Task[object]") -> None:
    task.cancel()
    await asyncio.wait({task})


@asynccontextmanager
async def _full(mesh: Mesh, operator: Operator) -> AsyncIterator[None]:
    """The worker has 32 slots and 2 places to wait in; all of them are taken."""
    tasks = [asyncio.ensure_future(_grpc(mesh, "Go on", n=n)) for n in (16, 16, 2)]
    try:
        await _reach(operator, lambda fleet: len(fleet.workers[0].heartbeat.leases) == len(tasks), "every slot is taken")
        yield
    finally:
        await asyncio.gather(*map(_leave, tasks))
    await _reach(operator, is_idle, "what filled the worker has left it", FREE_SECONDS)


_WAYS = {"grpc-cancel": _grpc, "grpc-deadline": _grpc_with_deadline, "http-stream": _http_stream, "http-whole": _http}


@pytest.mark.parametrize("way", _WAYS)
async def test_a_queued_request_that_ends_leaves_the_queue(mesh: Mesh, operator: Operator, way: str) -> None:
    async with _full(mesh, operator):
        await _end(mesh, operator, _WAYS[way], "Wait", _queued, lambda fleet: not fleet.queues)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("state", [_in_prefill, _in_decode])
async def test_a_running_request_that_ends_frees_its_blocks(
    mesh: Mesh, operator: Operator, state: Callable[[Fleet], bool], way: str
) -> None:
    prompt = f"Run of {way}. " + "Numbers without end: " * 1000 if state is _in_prefill else "Go on"
    await _end(mesh, operator, _WAYS[way], prompt, state, is_idle)


async def _end(
    mesh: Mesh, operator: Operator, ask: Ask, prompt: str, state: Callable[[Fleet], bool], over: Callable[[Fleet], bool]
) -> None:
    """Asks, waits for the state, ends the request, and sees it gone."""
    task = asyncio.ensure_future(ask(mesh, prompt))
    await _reach(operator, state, "the request is where it should be when it ends")
    assert not task.done()
    if ask is _grpc_with_deadline:
        await task
    else:
        await _leave(task)
    await _reach(operator, over, "the request has gone", FREE_SECONDS)


# -- the rest of B40


@pytest.mark.timeout(60 + NUM_CANCELS)
async def test_cancels_at_any_time(mesh: Mesh) -> None:
    """From the first byte's way to the gateway to the first tokens' way back."""
    drawn = random.Random(40)
    ways: list[Ask] = [_grpc, _http, _http_stream]
    room = asyncio.Semaphore(_AT_ONCE)

    async def cancelled(number: int) -> None:
        way, seconds = ways[number % len(ways)], drawn.uniform(0, _LAST_CANCEL_SECONDS)
        async with room:
            task = asyncio.ensure_future(way(mesh, f"Number {number % 5}"))
            await asyncio.wait({task}, timeout=seconds)
            assert not task.done(), task.exception()
            await _leave(task)

    await asyncio.gather(*(cancelled(number) for number in range(NUM_CANCELS)))
    await asyncio.to_thread(mesh.wait_until_idle)
    answer = mesh.openai().completions.create(model=mesh.model, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in answer.choices[0].text


_CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
for chunk in client.completions.create(model=sys.argv[3], prompt="Go on", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}):
    print("token", flush=True)
"""
_GRPC_CLIENT = """
import sys, grpc
from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
request = inference_pb2.GenerateRequest(text="Go on", sampling=types_pb2.SamplingParams(max_tokens=3000, ignore_eos=True))
for event in stub.Generate(request, metadata=[("authorization", f"Bearer {sys.argv[2]}")]):
    print("token", flush=True)
"""


@pytest.mark.parametrize("face", ["http", "grpc"])
def test_a_killed_client_frees_its_blocks(mesh: Mesh, operator: Operator, face: str) -> None:
    program, address = (_CLIENT, mesh.http_base_url) if face == "http" else (_GRPC_CLIENT, mesh.grpc_address)
    client = subprocess.Popen([sys.executable, "-c", program, address, mesh.token, mesh.model], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "token\n"
        operator.wait_until(_in_decode, "the request runs")
    finally:
        client.kill()
        client.communicate()
    operator.wait_until(is_idle, "the request has gone", FREE_SECONDS)


def test_a_half_closed_connection_frees_its_blocks(mesh: Mesh, operator: Operator) -> None:
    """The client says that it has nothing more to say, and stays to listen: to HTTP servers that is the client's end."""
    host, _, port = mesh.http_base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    body = f'{{"model": "{mesh.model}", "prompt": "Go on", "max_tokens": 3000, "ignore_eos": true, "stream": true}}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {mesh.token}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall((head + body).encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        operator.wait_until(_in_decode, "the request runs")
        client.shutdown(socket.SHUT_WR)
        operator.wait_until(is_idle, "the request has gone", FREE_SECONDS)
