"""The containers of one Compose project, by service: started, looked at, stopped. Knows docker's words, and no figure."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = "forebay-test"
DEPLOY = Path(__file__).parents[1]
_FILES = ("compose.yaml", "compose.observe.yaml", "ci/compose.test.yaml")
CORE = ("valkey", "scheduler-1", "scheduler-2", "worker-1", "worker-2", "gateway")


@dataclass(frozen=True)
class Stack:
    """One project in one engine. Commands that fail raise CalledProcessError with what they said."""

    environment: Mapping[str, str]

    def docker(self, *words: str) -> str:
        """What a docker command prints."""
        done = subprocess.run(["docker", *words], env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"docker {' '.join(words[:12])}: {done.stderr[-2000:]}")
        return done.stdout

    def compose(self, *words: str) -> str:
        """What a Compose command prints."""
        return self.docker("compose", "-p", PROJECT, *(word for file in _FILES for word in ("-f", str(DEPLOY / file))), *words)

    def inspect(self, service: str) -> dict[str, Any]:
        """Docker's whole word on the container of a service."""
        (found,) = json.loads(self.docker("inspect", self.compose("ps", "-a", "-q", service).strip()))
        return dict(found)

    def address(self, service: str, network: str) -> str:
        """The IP address of a service on one of the project's networks."""
        return str(self.inspect(service)["NetworkSettings"]["Networks"][f"{PROJECT}_{network}"]["IPAddress"])

    def image_megabytes(self, image: str) -> float:
        """All of its layers."""
        (found,) = json.loads(self.docker("image", "inspect", image))
        return float(found["Size"]) / 1e6


def is_healthy(container: Mapping[str, Any]) -> bool:
    """By its own health check."""
    state = container["State"]
    return bool(state["Running"]) and state.get("Health", {}).get("Status") == "healthy"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until the condition held. TimeoutError names what didn't come."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)
    return time.monotonic() - start


def command_lines(containers: Sequence[Mapping[str, Any]]) -> str:
    """Arguments and environment of the containers' first processes, as any list of processes on this machine may show them."""
    places = [Path(f"/proc/{container['State']['Pid']}/{name}") for container in containers for name in ("cmdline", "environ")]
    return "\n".join(place.read_text(errors="replace") for place in places)
