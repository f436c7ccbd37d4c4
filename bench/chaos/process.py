"""One process of the fleet: started, killed, stopped, and started again at its old addresses."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from services.cli import supervisor

_DEATHWATCH = str(Path(supervisor.__file__).with_name("deathwatch.py"))
_START_SECONDS = 60.0
_FEW_FILES = 64


class Process:
    """It dies with this process. `environment` holds all that it is told; what it prints as `listening` is in `facts`."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._command = command
        self.environment = dict(environment)
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.facts: dict[str, Any] = {}
        self.num_starts = 0
        self.told_skew: float | None = None  # seconds that its clock is ahead, by its own word
        self.skew = 0.0  # of its next start
        self.hardship = ""  # of its next start: blocked log, full disk, few files
        self._unread: int | None = None  # the end of its log's pipe that nobody reads

    @property
    def pid(self) -> int:
        """Of the process that lives, or lived last."""
        assert self._process is not None
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it hasn't ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.returncode if self._process is not None else None

    async def start(self, *, wait: bool = True) -> None:
        """Returns when it listens."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("FOREBAY_", "OTEL_"))}
        root = str(Path(__file__).parents[2])
        kept["PYTHONPATH"] = f"{root}:{root}/protos"
        self.num_starts += 1
        command = self._command
        if self.skew:
            command = [*command[:2], "bench.chaos.skewed", str(self.skew), command[2]]
        if self.hardship == "few files":
            command = ["prlimit", f"--nofile={_FEW_FILES}:{_FEW_FILES}", *command]
        with self._error_file() as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, _DEATHWATCH, str(os.getpid()), *command,
                env={**kept, **self.environment}, stdout=asyncio.subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        listening = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(self._process, listening))
        if wait:
            async with asyncio.timeout(_START_SECONDS):
                await listening

    def _error_file(self) -> IO[bytes]:
        """Where its log goes."""
        if self._unread is not None:
            os.close(self._unread)
            self._unread = None
        if self.hardship == "full disk":
            return open("/dev/full", "ab")  # the caller closes it
        if self.hardship == "blocked log":
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while os.write(writer, b"x" * 4096):
                    pass
            os.set_blocking(writer, True)
            self._unread = reader
            return os.fdopen(writer, "wb")
        return self._log.open("ab")

    async def _read(self, process: asyncio.subprocess.Process, listening: asyncio.Future[None]) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "clock":
                    self.told_skew = round(event["now"] - time.time())
                if event.get("event") == "listening" and not listening.done():
                    self.facts = event
                    listening.set_result(None)
        await process.wait()
        if not listening.done():
            listening.set_exception(RuntimeError(f"{self.name} ended with {process.returncode} before it listened: see {self._log}"))
            listening.exception()  # nobody may wait for it

    def signal(self, number: signal.Signals) -> None:
        """To a process that lives; SIGSTOP and SIGCONT too."""
        if self.lives:
            os.kill(self.pid, number)

    async def ended(self, seconds: float = 30.0) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        async with asyncio.timeout(seconds):
            return await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self, seconds: float = 40.0) -> int:
        """SIGTERM, and SIGKILL for the late."""
        self.signal(signal.SIGTERM)
        try:
            return await self.ended(seconds)
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    @property
    def feels_hardship(self) -> bool:
        """Whether the process that lives runs under what it was to be started under, by the kernel's word."""
        if self.hardship == "few files":
            limits = Path(f"/proc/{self.pid}/limits").read_text()
            return any(line.startswith("Max open files") and line.split()[3] == str(_FEW_FILES) for line in limits.splitlines())
        log = os.readlink(f"/proc/{self.pid}/fd/2")
        return log.startswith("pipe:") if self.hardship == "blocked log" else log == "/dev/full"

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP has taken effect."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"


async def until(condition: Any, what: str, seconds: float = 30.0) -> float:
    """Waits for a condition, a function or coroutine function; seconds that it took. TimeoutError says what didn't come about."""
    began = time.monotonic()
    while True:
        outcome = condition()
        if asyncio.iscoroutine(outcome):
            outcome = await outcome
        if outcome:
            return time.monotonic() - began
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)
