"""Child processes: start in order, restart what dies, stop in reverse. Knows nothing of what they do.

A child prints JSON lines on stdout; the one with `"event": "listening"` says that it is up and where. stderr goes to its log.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.problem import Problem

_DEATHWATCH = str(Path(__file__).with_name("deathwatch.py"))
_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0
_LOG_TAIL_LINES = 12
_MAX_LOG_BYTES = 64 << 20
_LOG_LOOK_SECONDS = 60.0


@dataclass(frozen=True)
class Event:
    """News of a child: kind is starting, loading, listening, died, restarting or stopped; facts depend on it."""

    child: str
    kind: str
    facts: Mapping[str, object] = field(default_factory=dict)


Listener = Callable[[Event], None]
Probe = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class ChildSpec:
    """How to run one child."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # After the first start, environment[value] = listening[key]: a restart comes back to the same addresses.
    pins: Mapping[str, str] = field(default_factory=dict)
    # For a program that prints no JSON: polled until it is true.
    probe: Probe | None = None
    stop_seconds: float = 15.0
    start_seconds: float = 600.0


class Supervisor:
    """Owns the children of one mesh. Runs on one event loop in the main thread: a child dies with the thread that made it."""

    def __init__(self, log_directory: Path, listener: Listener) -> None:
        self._log_directory = log_directory
        self._listener = listener
        self._children: list[_Child] = []

    async def start(self, spec: ChildSpec) -> Mapping[str, object]:
        """Starts a child and returns what it said when it was listening. Problem with its last log lines where it dies before that."""
        child = _Child(spec, self._log_directory / f"{spec.name}.log", self._listener)
        self._children.append(child)
        return await child.start()

    async def stop(self) -> None:
        """Stops the children in reverse order of their start, neighbours of one kind together: SIGTERM, and SIGKILL for the late."""
        for child in self._children:
            child.stopping.set()  # what dies from now on stays dead
        while self._children:
            group = [child for child in self._children if child.kind == self._children[-1].kind]
            await asyncio.gather(*(child.stop() for child in group))
            self._children = [child for child in self._children if child not in group]

    def kill(self) -> None:
        """Ends every child at once, during `stop` too; for a second Ctrl-C."""
        for child in self._children:
            child.stopping.set()
            child.signal(signal.SIGKILL)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that live now."""
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}


class _Child:
    def __init__(self, spec: ChildSpec, log_path: Path, listener: Listener) -> None:
        self.spec = spec
        self._environment = {**os.environ, **spec.environment}
        self._log_path = log_path
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Future[Mapping[str, object]] | None = None
        self._run: asyncio.Task[float] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()

    @property
    def kind(self) -> str:
        """worker-1 and worker-2 are of one kind."""
        return self.spec.name.rstrip("0123456789")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> Mapping[str, object]:
        self._log_path.write_bytes(b"")
        self._tell("starting")
        run = self._run = asyncio.create_task(self._run_once())
        self._listening = asyncio.get_running_loop().create_future()
        either: set[asyncio.Future[Any]] = {run, self._listening}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=self.spec.start_seconds)
        if not self._listening.done():
            died = run.done()
            if not died:
                self.signal(signal.SIGKILL)
                await run
            raise Problem(*self._last_words(died))
        facts = self._listening.result()
        for fact, variable in self.spec.pins.items():
            if fact in facts:
                self._environment[variable] = str(facts[fact])
        self._watch = asyncio.create_task(self._keep_running())
        return facts

    async def stop(self) -> None:
        self.signal(signal.SIGTERM)
        if self._run is not None:
            await asyncio.wait({self._run}, timeout=self.spec.stop_seconds)
            self.signal(signal.SIGKILL)
            await asyncio.wait({self._run})
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._tell("stopped")

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _keep_running(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            assert self._run is not None
            lived_seconds = await self._run
            if self.stopping.is_set():
                return
            if lived_seconds > _HEALTHY_SECONDS:
                backoff = _FIRST_BACKOFF_SECONDS
            self._tell(
                "died", how=self._how_it_ended(), backoff_seconds=backoff, log=str(self._log_path), pid=self._process and self._process.pid
            )
            await asyncio.sleep(backoff)
            if self.stopping.is_set():
                return
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
            self._tell("restarting")
            self._run = asyncio.create_task(self._run_once())

    async def _run_once(self) -> float:
        """Runs the program to its end; returns the seconds that it lived."""
        start = time.monotonic()
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, _DEATHWATCH, str(os.getpid()), *self.spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                # A probed program owes us no JSON: all that it says is log.
                stdout=asyncio.subprocess.PIPE if self.spec.probe is None else log,
                stderr=log if self.spec.probe is None else asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C on the terminal is ours to pass on, in order
            )
        if self.stopping.is_set():  # the stop came too early to signal it
            self.signal(signal.SIGKILL)
        news = asyncio.create_task(self._poll(self.spec.probe) if self.spec.probe is not None else self._read_events())
        try:
            while self._process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _LOG_LOOK_SECONDS)
                self._bound_log()
            if self.spec.probe is None:
                await asyncio.wait({news}, timeout=1)
        finally:
            news.cancel()
            await asyncio.wait({news})
        return time.monotonic() - start

    async def _read_events(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while not self._process.stdout.at_eof():
            try:
                event = json.loads(await self._process.stdout.readline())
            except ValueError:
                continue  # a stray print, or a line too long for the buffer, is not worth a mesh
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                self._heard(event["event"], event)

    def _bound_log(self) -> None:
        """Keeps the last two spans of a long life's log. The child appends, so it goes on at the front of the emptied file."""
        with contextlib.suppress(OSError):  # a full disk, or a log that somebody removed, ends no child
            if self._log_path.stat().st_size > _MAX_LOG_BYTES:
                shutil.copyfile(self._log_path, self._log_path.with_suffix(".log.1"))
                os.truncate(self._log_path, 0)

    async def _poll(self, probe: Probe) -> None:
        while not await probe():  # noqa: ASYNC110  # another process's readiness sets no event of ours
            await asyncio.sleep(0.02)
        self._heard("listening", {})

    def _heard(self, kind: str, facts: Mapping[str, object]) -> None:
        self._tell(kind, **{key: value for key, value in facts.items() if key != "event"})
        if kind == "listening" and self._listening is not None and not self._listening.done():
            self._listening.set_result(facts)

    def _tell(self, kind: str, **facts: object) -> None:
        self._listener(Event(self.spec.name, kind, facts))

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _last_words(self, died: bool) -> tuple[str, tuple[str, ...]]:
        lines = tuple(self._log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        what = self._how_it_ended() if died else f"said nothing for {self.spec.start_seconds:g} s"
        return f"{self.spec.name} did not start: it {what}. Its log is {self._log_path}", lines
