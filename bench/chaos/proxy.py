"""A TCP proxy on the loopback interface whose link can be cut, held up or slowed: a network to break."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Connect = Callable[[], Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
_CHUNK = 64 << 10


class Proxy:
    """Listens at `address` and passes on to what `connect` opens.

    `hold` keeps bytes back in both directions, connections open and no word said, as a partition does; `refuse` closes new
    connections and breaks the old ones; `delay` is added to each piece that passes.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._flows = {True: asyncio.Event(), False: asyncio.Event()}  # towards the target, and back
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refuses = False
        self.delay = 0.0
        self.num_held = 0  # pieces that waited: the proof that a hold was felt
        self.address = ""
        self.heal()

    async def start(self) -> str:
        """host:port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self.address

    async def stop(self) -> None:
        """Closes everything."""
        if self._server is not None:
            self._server.close()
        self.break_connections()
        for task in list(self._tasks):
            task.cancel()

    def hold(self, *, towards: bool = True, back: bool = True) -> None:
        """Nothing passes any more in these directions."""
        for direction, held in ((True, towards), (False, back)):
            if held:
                self._flows[direction].clear()

    def heal(self) -> None:
        """All passes again, what was held too."""
        self.refuses, self.delay = False, 0.0
        for flow in self._flows.values():
            flow.set()

    def break_connections(self) -> None:
        """Ends what is open."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self.refuses:
                return
            target_reader, target_writer = await self._connect()
            self._writers.add(target_writer)
            try:
                await asyncio.gather(self._pump(reader, target_writer, towards=True), self._pump(target_reader, writer, towards=False))
            finally:
                self._writers.discard(target_writer)
                target_writer.transport.abort()
        except OSError:
            pass  # either end has gone
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, towards: bool) -> None:
        while piece := await reader.read(_CHUNK):
            if not self._flows[towards].is_set():
                self.num_held += 1
                await self._flows[towards].wait()
            if self.delay:
                await asyncio.sleep(self.delay)
            writer.write(piece)
            await writer.drain()
        writer.transport.abort()  # one half's end is the whole's


def to_address(address: str) -> Connect:
    """A target by host:port."""
    host, _, port = address.rpartition(":")
    return lambda: asyncio.open_connection(host, int(port))


def to_socket(path: str) -> Connect:
    """A target by the path of its Unix socket."""
    return lambda: asyncio.open_unix_connection(path)
