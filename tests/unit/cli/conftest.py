"""The gateway that the commands find."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from forebay.v1 import admin_pb2_grpc, inference_pb2_grpc
from services.common import rpc
from tests.unit.cli.gateway import Gateway


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """Serves from a thread of its own: the commands bring their own event loop."""
    gateway, started, loop = Gateway(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    address = ""

    async def serve() -> None:
        nonlocal address
        server = rpc.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(gateway, server)
        address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    monkeypatch.setenv("FOREBAY_ADDRESS", address)
    monkeypatch.setenv("FOREBAY_TOKEN", "secret")
    monkeypatch.setenv("COLUMNS", "200")
    yield gateway
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
