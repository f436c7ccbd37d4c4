"""A real mesh for tests: `forebay up --json` as a process of its own, on free ports, in a folder of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from openai import AsyncOpenAI, OpenAI

from forebay.v1 import admin_pb2, admin_pb2_grpc
from services.cli import supervisor

START_SECONDS = 120
FOREBAY = (sys.executable, "-P", "-m", "services.cli")
_clients: list[OpenAI] = []


def sdk(mesh: "Mesh", key: str, **options: Any) -> OpenAI:
    """The SDK with any key, without retries. `close_sdks` ends it: what a collector finds first, client or socket, is chance."""
    client = OpenAI(base_url=mesh.http_base_url, api_key=key, max_retries=0, **options)
    _clients.append(client)
    return client


def close_sdks() -> None:
    """Closes all clients that `sdk` has made."""
    while _clients:
        _clients.pop().close()


@dataclass(frozen=True)
class Mesh:
    """What `up` said when it was up, and the process that said it."""

    process: "subprocess.Popen[str]"
    home: Path
    grpc_address: str
    http_base_url: str
    token: str
    models: tuple[str, ...]
    processes: dict[str, int]

    @property
    def model(self) -> str:
        """The first model's name."""
        return self.models[0]

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """For gRPC calls."""
        return [("authorization", f"Bearer {self.token}")]

    @property
    def environment(self) -> dict[str, str]:
        """In which `forebay` finds this mesh."""
        return environment(self.home)

    def openai(self, **options: Any) -> OpenAI:
        """The SDK, without retries: a failure is a failure."""
        return sdk(self, self.token, **options)

    def async_openai(self) -> AsyncOpenAI:
        """As openai."""
        return AsyncOpenAI(base_url=self.http_base_url, api_key=self.token, max_retries=0)

    def channel(self) -> grpc.Channel:
        """To the gRPC face."""
        return grpc.insecure_channel(self.grpc_address)

    def forebay(self, *arguments: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Runs a forebay command against this mesh."""
        return subprocess.run(
            [*FOREBAY, *arguments], env=self.environment, input=text, capture_output=True, text=True, check=False, timeout=60
        )

    def fleet(self) -> dict[str, Any]:
        """`forebay ps --json`."""
        done = self.forebay("ps", "--json")
        assert done.returncode == 0, done.stderr
        fleet: dict[str, Any] = json.loads(done.stdout)
        return fleet

    @contextmanager
    def operator(self) -> Iterator["Operator"]:
        """GetFleet over one open channel."""
        with self.channel() as channel:
            yield Operator(admin_pb2_grpc.AdminServiceStub(channel), self.metadata)

    def worker_pid(self, name: str) -> int:
        """Of a worker as it is now; `processes` has those of the start."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child.pid for child in children if child.environ().get("FOREBAY_WORKER_ID") == name)

    def wait_until_idle(self) -> None:
        """Waits until no worker has a request, a lease or a block in use."""
        with self.operator() as operator:
            # The next heartbeat may have been on its way already when what should have ended began.
            fresh = {key: number + 2 for key, number in _heartbeats(operator.fleet()).items()}

            def idle(fleet: admin_pb2.GetFleetResponse) -> bool:
                return is_idle(fleet) and all(number >= fresh.get(key, 2) for key, number in _heartbeats(fleet).items())

            operator.wait_until(idle, "the workers are idle")

    def logs(self) -> str:
        """The last lines of every child."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted((self.home / "logs").glob("*.log"))
        )


@dataclass(frozen=True)
class Operator:
    """Sees the fleet as it is: a call takes a few milliseconds."""

    stub: admin_pb2_grpc.AdminServiceStub
    metadata: list[tuple[str, str]]

    def fleet(self) -> admin_pb2.GetFleetResponse:
        """What the scheduler knows now."""
        return self.stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=tuple(self.metadata), timeout=10)

    def wait_until(self, condition: Callable[[admin_pb2.GetFleetResponse], bool], what: str, seconds: float = 60) -> float:
        """Polls until the fleet is so; returns the seconds that it took."""
        start = time.monotonic()
        wait_until(lambda: condition(self.fleet()), what, seconds)
        return time.monotonic() - start


def is_idle(fleet: admin_pb2.GetFleetResponse) -> bool:
    """Whether no worker has a request, a lease or a block in use, and none waits."""
    beats = [worker.heartbeat for worker in fleet.workers]
    busy = [beat for beat in beats if beat.num_running or beat.num_waiting or beat.num_used_blocks or beat.leases]
    return bool(beats) and not busy and not fleet.queues


def _heartbeats(fleet: admin_pb2.GetFleetResponse) -> dict[str, int]:
    """Incarnation -> number of its latest heartbeat."""
    return {worker.registration.incarnation: worker.heartbeat.sequence_number for worker in fleet.workers}


def environment(home: Path) -> dict[str, str]:
    """This process's environment with FOREBAY_HOME, and no FOREBAY_* else."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
    # One thread: two that wait for each other on a core that other tests use run many times slower.
    return {**kept, "FOREBAY_HOME": str(home), "FOREBAY_NUM_THREADS": "1", "COLUMNS": "200"}


@contextmanager
def running(home: Path, *arguments: str, settings: Mapping[str, str] | None = None) -> Iterator[Mesh]:
    """A mesh that is up, with these variables beside its usual ones; ended with SIGINT, as a person would."""
    # Under deathwatch: a test process that is ended by its timeout leaves no mesh behind.
    deathwatch = str(Path(supervisor.__file__).with_name("deathwatch.py"))
    command = [sys.executable, deathwatch, str(os.getpid()), *FOREBAY, "up", "--json", "--grpc-port", "0", "--http-port", "0", *arguments]
    errors = home.with_name(home.name + ".stderr")
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, env={**environment(home), **(settings or {})}, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield _wait_for_up(process, home, errors)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _wait_for_up(process: "subprocess.Popen[str]", home: Path, errors: Path) -> Mesh:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "up":
            facts = {key: event[key] for key in ("grpc_address", "http_base_url", "token", "processes")}
            return Mesh(process, home, models=tuple(event["models"]), **facts)
    raise AssertionError(f"the mesh did not come up: {errors.read_text()}")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Polls a condition outside this process, where nothing can be awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def living(pids: dict[str, int]) -> dict[str, int]:
    """Those of the processes that are still there."""
    return {name: pid for name, pid in pids.items() if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
