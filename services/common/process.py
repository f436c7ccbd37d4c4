"""A process's life: one event loop, a stop signal, an internal HTTP port with /metrics, /health and /ready."""

import asyncio
import json
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.common import metrics, tracing
from services.common.address import split

_OPEN_FILES = 16 << 10

Ready = Callable[[], str | None]
"""None when the process takes work, else the reason why not, for people."""


def run(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `serve(stop)` on a fresh uvloop. SIGTERM and SIGINT set `stop`; serve drains and returns."""
    _allow_open_files()

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    try:
        uvloop.run(main())
    finally:
        tracing.shutdown()


def _allow_open_files() -> None:
    """Many systems allow a process 1024 open files unless it asks for more: fewer than the connections that it may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def announce(event: str, **facts: object) -> None:
    """Tells whoever started this process, with a JSON line on stdout. Nothing else is printed there."""
    print(json.dumps({"event": event, **facts}), flush=True)


async def until(stop: asyncio.Event, *loops: asyncio.Task[None]) -> None:
    """Returns when `stop` is set. Raises what has ended one of the loops, if that comes first: better gone than half alive."""
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *loops], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    for task in done:
        task.result()


class InternalHttp:
    """The internal port: /metrics (Prometheus), /health (the process is sound), /ready (it takes work). 503 says why not.

    The process's own figures join the service's in `registry`.
    """

    def __init__(self, address: str, registry: CollectorRegistry, ready: Ready, *, sound: Ready = lambda: None) -> None:
        """`sound`: None, or why only a restart helps."""
        metrics.add_process(registry)
        self._lag = metrics.LoopLag(registry)
        self._registry = registry
        self._ready = ready
        self._sound = sound
        routes = [Route("/metrics", self._metrics), Route("/health", self._health), Route("/ready", self._readiness)]
        self._http = HttpServer(Starlette(routes=routes), address)

    async def start(self) -> int:
        """Listens and returns the port."""
        port = await self._http.start()
        self._lag.start()
        return port

    async def stop(self) -> None:
        """Closes the port."""
        self._lag.stop()
        await self._http.stop()

    async def _metrics(self, request: Request) -> Response:
        body, content_type = metrics.exposition(self._registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _health(self, _: Request) -> Response:
        reason = self._sound()
        return PlainTextResponse("ok\n" if reason is None else f"not ok: {reason}\n", 200 if reason is None else 503)

    async def _readiness(self, _: Request) -> Response:
        reason = self._ready()
        return PlainTextResponse("ready\n" if reason is None else f"not ready: {reason}\n", 200 if reason is None else 503)


_BACKLOG = 2048


class HttpServer:
    """An ASGI app on the running event loop, without uvicorn's own signal handling."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        address: str,
        *,
        drain_seconds: int = 10,
        protocol: Callable[..., asyncio.Protocol] = H11Protocol,
        tls: ssl.SSLContext | None = None,
        share_port: bool = False,
    ) -> None:
        """`protocol` makes what serves one connection, with the arguments of uvicorn's own. `share_port`: others may have it, too."""
        host, port = split(address)
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=protocol,  # type: ignore[arg-type]  # uvicorn calls it, class or not
            ws="none",
            timeout_graceful_shutdown=drain_seconds,
            h11_max_incomplete_event_size=64 << 10,
        )
        self._server = uvicorn.Server(config)
        self._tls = tls
        self._share_port = share_port
        self._address = address
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens and returns the port. OSError names the address where it is taken."""
        listener = self._listen()
        self._server.config.load()
        self._server.config.ssl = self._tls
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        # _serve, not serve: uvicorn's serve() takes over the process's signal handlers.
        self._task = asyncio.create_task(self._server._serve(sockets=[listener]))
        port: int = listener.getsockname()[1]
        return port

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._server.config.host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(self._share_port))
            listener.bind((self._server.config.host, self._server.config.port))
        except OSError as error:
            listener.close()
            raise OSError(f"cannot listen on {self._address} ({error.strerror}): choose another port or stop what uses it") from error
        listener.listen(_BACKLOG)  # from here on clients may connect, before uvicorn has come round to it
        listener.setblocking(False)
        return listener

    async def stop(self) -> None:
        """Lets open responses end, then closes."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
