"""A port that several listeners have, and one of them leaves."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette

from services.common import rpc
from services.common.handover import turn_deaf
from services.common.process import HttpServer

NUM_CLIENTS = 32


def _listener(port: int = 0) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    listener.setblocking(False)
    return listener


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        yield connection


async def test_whoever_comes_while_a_listener_is_deaf_is_taken_by_the_other_one() -> None:
    loop = asyncio.get_running_loop()
    with _listener() as going:
        port = going.getsockname()[1]
        early = socket.create_connection(("127.0.0.1", port))
        assert turn_deaf(port) == 1
        with _listener(port) as staying:
            clients = [socket.socket() for _ in range(NUM_CLIENTS)]
            for client in clients:
                client.setblocking(False)
            connecting = [asyncio.create_task(loop.sock_connect(client, ("127.0.0.1", port))) for client in clients]
            await asyncio.wait(connecting, return_when=asyncio.FIRST_COMPLETED)
            taken = list(_accepted(going))
            assert [connection.getpeername() for connection in taken] == [early.getsockname()], "who came before, and nobody else"
            going.close()
            await asyncio.gather(*connecting)
            served = list(_accepted(staying))
            assert {connection.getpeername() for connection in served} == {client.getsockname() for client in clients}
            for connection in (early, *taken, *clients, *served):
                connection.close()


async def test_other_ports_go_on_hearing() -> None:
    with _listener() as going, _listener() as other:
        assert turn_deaf(going.getsockname()[1]) == 1
        with socket.create_connection(other.getsockname()):
            pass


@pytest.mark.parametrize("share_port", [False, True])
async def test_a_port_is_shared_where_that_is_said_and_nowhere_else(share_port: bool) -> None:
    servers = [rpc.server(share_port=share_port) for _ in range(2)]
    port = rpc.bind(servers[0], "127.0.0.1:0", share_port=share_port)
    first = HttpServer(Starlette(), "127.0.0.1:0", share_port=share_port)
    second = HttpServer(Starlette(), f"127.0.0.1:{await first.start()}", share_port=share_port)
    if share_port:
        assert rpc.bind(servers[1], f"127.0.0.1:{port}", share_port=True) == port
        assert turn_deaf(port) == 2, "gRPC's own listeners are found"
        await second.start()
    else:
        with pytest.raises(OSError, match="cannot listen on"):
            rpc.bind(servers[1], f"127.0.0.1:{port}")
        with pytest.raises(OSError, match="cannot listen on"):
            await second.start()
    await asyncio.gather(first.stop(), second.stop(), *(server.stop(None) for server in servers))
