"""`forebay up`: starts a mesh on this machine and keeps it up until Ctrl-C."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from services.cli import models, screen
from services.cli.home import Home
from services.cli.mesh import Mesh, Plan
from services.cli.options import choice, memory, text, whole
from services.cli.policy import require_usable
from services.cli.problem import Problem
from services.common.settings import LOG_LEVELS

LEVELS = ("auto", "fp32", "bf16", "int8", "int4")
Result = TypeVar("Result")


def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            parser=text("--model"),
            metavar="MODEL",
            help="GGUF file, model folder or hub name, with =ALIAS behind. May be repeated. Left out: one that chats, one that embeds.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", parser=whole("--workers", 1, 64), metavar="N", help="Workers per model.")] = 1,
    gateways: Annotated[
        int, typer.Option("--gateways", parser=whole("--gateways", 1, 64), metavar="N", help="Gateways, all on the same two ports.")
    ] = 1,
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Each worker has every model, which take turns at each step, instead of one per model; so it is without --model.",
        ),
    ] = False,
    host: Annotated[
        str,
        typer.Option(parser=text("--host"), metavar="ADDRESS", help="Where the gateway listens; 0.0.0.0 opens it to the network."),
    ] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(parser=whole("--grpc-port", 0, 65535), metavar="PORT", help="0: any free one.")] = 50051,
    http_port: Annotated[int, typer.Option(parser=whole("--http-port", 0, 65535), metavar="PORT", help="0: any free one.")] = 8000,
    level: Annotated[
        str,
        typer.Option(
            parser=choice("--level", LEVELS),
            metavar="LEVEL",
            help="Of the weights: fp32, bf16, int8, int4; auto: as few bits as the file has.",
        ),
    ] = "auto",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            parser=memory("--kv-memory"), metavar="SIZE", help="Cache memory per worker, such as 512MB. Left out: the worker's default."
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            parser=memory("--device-memory"),
            metavar="SIZE",
            help="With --share: what a worker's models have for weights, cache and workspace; they take turns where not all fit.",
        ),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="Orgs, tiers, classes and models, as `forebay policy check` takes it.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Mutual TLS between the services, by certificates made for them; the gateway's ports stay plain.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(parser=choice("--log-level", LOG_LEVELS), metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of a screen: one per event, `up` when it is up.")] = False,
) -> None:
    """Starts a mesh and keeps it up until Ctrl-C.

    Its processes are Valkey, a scheduler, workers and gateways.
    """
    if os.environ.get("FOREBAY_PUBLIC_TLS_CERT_FILE"):
        raise Problem("FOREBAY_PUBLIC_TLS_CERT_FILE is for a gateway run by itself (python -m services.gateway): unset it for `forebay up`")
    if policy is not None:
        require_usable(policy)
    if device_memory is not None and not share:
        raise Problem("--device-memory is for models that share a worker: give --share, too")
    plan = Plan(
        tuple(models.find_all(model or [])),
        workers,
        host,
        grpc_port,
        http_port,
        level,
        kv_memory,
        log_level,
        policy,
        tls,
        share or not model,
        device_memory,
        gateways,
    )
    asyncio.run(_keep_up(plan, Home.from_environment(), as_json))


async def _keep_up(plan: Plan, home: Home, as_json: bool) -> None:
    console = Console()
    steps = screen.StepList(console)
    hear = screen.json_listener() if as_json else steps.hear
    home.make()
    with home.lock():
        mesh = Mesh(plan, home, hear)
        async with until_signal(mesh) as stopped:
            with contextlib.nullcontext() if as_json else steps:
                running = await unless(stopped, mesh.start())
            if as_json:
                print(json.dumps({"event": "up", **asdict(running)}), flush=True)
            else:
                screen.print_box(console, running)
            await stopped.wait()
            if not as_json:
                behind_ctrl_c = "\n" if console.is_terminal else ""
                console.print(f"{behind_ctrl_c}stopping: streams in flight may end first; Ctrl-C again ends them at once")


async def unless(stopped: asyncio.Event, work: Coroutine[object, object, Result]) -> Result:
    """What the work comes to; KeyboardInterrupt when the event is set first."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    either: set[asyncio.Future[Any]] = {task, stop}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    raise KeyboardInterrupt


@contextlib.asynccontextmanager
async def until_signal(mesh: Mesh) -> AsyncIterator[asyncio.Event]:
    """Stops the mesh when the block ends. The event is set by the first signal; the second kills."""
    stopped = asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            mesh.kill()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopped
    finally:
        await mesh.stop()
