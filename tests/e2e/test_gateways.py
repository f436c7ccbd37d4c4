"""Two gateways on one port: both serve, and either may be replaced under load without a request that fails."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import psutil
import pytest

from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.cli.home import Home
from tests.e2e import mesh as meshes

_SHORT, _LONG = 2, 150
_KNOCKERS = 32
_GATEWAYS = ("gateway-1", "gateway-2")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[meshes.Mesh]:
    with meshes.running(tmp_path_factory.mktemp("twins") / "home", "--gateways", "2", "--model", "smollm2-135m-instruct") as running:
        yield running


@dataclass
class Client:
    """Asks over new connections and over kept ones."""

    mesh: meshes.Mesh
    kept: httpx.AsyncClient
    channel: grpc.aio.Channel
    num_answers: int = 0

    def http(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.mesh.token}"}
        return httpx.AsyncClient(base_url=self.mesh.http_base_url, headers=headers, timeout=60, trust_env=False)

    async def new_http(self) -> None:
        async with self.http() as client:
            await self.ask(client)

    async def kept_http(self) -> None:
        await self.ask(self.kept)

    async def new_grpc(self) -> None:
        # A pool of its own: else a channel to the same address has the last one's connection.
        async with grpc.aio.insecure_channel(self.mesh.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            await self.call(channel, _SHORT)

    async def kept_grpc(self) -> None:
        await self.call(self.channel, _SHORT)

    async def knock(self) -> None:
        """A connection that asks for next to nothing: many of these are on their way at any moment."""
        url = httpx.URL(self.mesh.http_base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "answered, not reset"
        await reader.read()
        writer.close()

    async def ask(self, client: httpx.AsyncClient) -> None:
        body = {"model": self.mesh.model, "prompt": "Two", "max_tokens": _SHORT, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == _SHORT

    async def call(self, channel: grpc.aio.Channel, num_tokens: int) -> None:
        sampling = types_pb2.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(model=self.mesh.model, text="Two", sampling=sampling)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        last = None
        async for event in stub.Generate(request, metadata=self.mesh.metadata, timeout=60):
            last = event
        assert last is not None
        assert last.finished.usage.completion_tokens == num_tokens

    async def until(self, over: Callable[[], bool], way: Callable[[], Awaitable[None]]) -> None:
        """Again and again, and once more behind it."""
        while not over():
            await way()
            self.num_answers += 1
        await way()


async def _calls(mesh: meshes.Mesh, gateway: str) -> float:
    """How many calls a gateway has answered, by its own metrics."""
    running = Home(mesh.home).read()
    assert running is not None
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{running.internal_addresses[gateway]}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("forebay_calls_total"))


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_both_serve_and_one_goes_under_load_without_an_error(twins: meshes.Mesh) -> None:
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(twins.grpc_address))
        client = Client(twins, httpx.AsyncClient(), channel)
        client.kept = await stack.enter_async_context(client.http())
        async with asyncio.timeout(60):
            while not all([await _calls(twins, gateway) for gateway in _GATEWAYS]):
                await client.new_http()
                await client.new_grpc()
        before = {gateway: await _calls(twins, gateway) for gateway in _GATEWAYS}

        pid = twins.processes["gateway-1"]
        ways = (client.new_http, client.kept_http, client.new_grpc, client.kept_grpc)
        tasks = [asyncio.create_task(client.until(lambda: _is_gone(pid), way)) for way in ways for _ in range(2)]
        tasks += [asyncio.create_task(client.until(lambda: _is_gone(pid), client.knock)) for _ in range(_KNOCKERS)]
        long = [asyncio.create_task(_stream(client)) for _ in range(6)]
        while client.num_answers < len(tasks):  # noqa: ASYNC110  # answers set no event
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGTERM)
        await asyncio.gather(*tasks, *long)
        assert await _calls(twins, "gateway-2") > before["gateway-2"]

        async with asyncio.timeout(60):  # the supervisor has started it again, at the same addresses
            while not await _serves_again(twins):
                await client.new_http()


async def _stream(client: Client) -> None:
    async with grpc.aio.insecure_channel(client.mesh.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        await client.call(channel, _LONG)


async def _serves_again(mesh: meshes.Mesh) -> bool:
    try:
        return await _calls(mesh, "gateway-1") > 0
    except httpx.HTTPError:
        return False
