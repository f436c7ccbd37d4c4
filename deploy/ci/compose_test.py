"""Builds the stack, runs it, breaks it, and prints what came of it as JSON lines. Exit code 1 where a figure doesn't hold.

`make compose-test`: root, Debian 12. It starts an engine of its own, or takes one that is there (--engine present).
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.figure import line, show
from deploy.ci import engine, figures
from deploy.ci.load import Gateway
from deploy.ci.stack import DEPLOY, Stack
from services.cli import models
from tools import compose_files

_BUILT = ("valkey", "scheduler-1", "gateway", "prometheus", "worker-1")


def _stack(environment: Mapping[str, str], folder: Path, ports: tuple[int, int, int]) -> tuple[Stack, Gateway]:
    """A project with secrets of its own, on ports that nothing else has."""
    folder.mkdir(parents=True, exist_ok=True)
    compose_files.make(folder)
    grpc_port, http_port, prometheus_port = map(str, ports)
    settings = {
        "COMPOSE_ENV_FILES": str(folder / ".env"),
        "FOREBAY_SECRETS": str(folder / "secrets"),
        "FOREBAY_GRPC_PORT": grpc_port,
        "FOREBAY_HTTP_PORT": http_port,
        "FOREBAY_PROMETHEUS_PORT": prometheus_port,
    }
    if _has_torch_wheel():
        settings["TORCH_INDEX"] = ""
    token = (folder / "secrets" / "token").read_text()
    generates, embeds = models.defaults()
    gateway = Gateway(f"http://127.0.0.1:{http_port}", token, generates.name, embeds.name)
    return Stack({**environment, **settings}), gateway


def _has_torch_wheel() -> bool:
    """Whether deploy/wheels has a CPU build of torch, from wherever this machine's pip gets one; else the image asks PyTorch's index."""
    wheels = DEPLOY / "wheels"
    (pin,) = [line for line in (DEPLOY.parent / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    name = f"{pin.replace('==', '-')}+cpu-cp311-*.whl"
    if not any(wheels.glob(name)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version", "3.11", "--only-binary", ":all:"]
        subprocess.run([*command, "-d", str(wheels), f"{pin}+cpu"], capture_output=True)
    return any(wheels.glob(name))


@contextlib.contextmanager
def _present(_: Path) -> Iterator[Mapping[str, str]]:
    yield os.environ


def main(argv: list[str]) -> int:
    """0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["private", "present"], default="private", help="a dockerd of its own, or the one there is")
    parser.add_argument("--folder", type=Path, help="keeps images here for the next run; left out: nothing is kept")
    parser.add_argument(
        "--or-say-why", action="store_true", help="where this machine can run no containers: a line that says so, and exit code 0"
    )
    parser.add_argument("--ports", type=int, nargs=3, default=(50151, 8100, 9191), help="published: gRPC, HTTP, Prometheus")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-compose-", dir="/var/tmp")))
        running = engine.running if args.engine == "private" else _present
        try:
            environment = stack.enter_context(running(folder))
        except engine.CannotRunHere as why:
            show(line("compose_test", f"NOT RUN, this machine can't: {why}", ""))
            return 0 if args.or_say_why else 1
        project, gateway = _stack(environment, folder / "project", tuple(args.ports))
        print("building images", file=sys.stderr)
        project.compose("build", *_BUILT)
        stack.callback(project.compose, "down", "--volumes", "--timeout", "20")
        stack.push(lambda kind, *_: None if kind is None else print(project.compose("logs", "--tail", "30"), file=sys.stderr))
        failed = 0
        for figure in figures.all_of(project, gateway):
            show(figure)
            failed += figure["holds"] is False
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
