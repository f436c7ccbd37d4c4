"""The supervisor with small stand-in programs: start, restart, ordered stop, and no orphan after SIGKILL."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.cli import supervisor as supervisor_module
from services.cli.problem import Problem
from services.cli.supervisor import ChildSpec, Event, Supervisor

_LISTENS = """
import json, os, signal, sys
print("not json", flush=True)
print(json.dumps({"event": "loading", "done": 1, "total": 2}), flush=True)
print(json.dumps({"event": "listening", "address": os.environ.get("ADDRESS", "127.0.0.1:7777")}), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
"""
_DIES = "import sys; print('the port is taken', file=sys.stderr); sys.exit(3)"
_IGNORES_SIGTERM = _LISTENS.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN").replace("signal.pause()", "while True: signal.pause()")


class Events:
    """Collects events; `wait` returns the n-th of a kind."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self._news = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.seen.append(event)
        self._news.set()

    async def wait(self, kind: str, count: int = 1) -> Event:
        while len(found := [event for event in self.seen if event.kind == kind]) < count:
            self._news.clear()
            await self._news.wait()
        return found[count - 1]


def _spec(name: str, code: str, **more: object) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), **more)  # type: ignore[arg-type]


async def test_start_returns_what_the_child_said(tmp_path: Path) -> None:
    events = Events()
    supervisor = Supervisor(tmp_path, events)
    facts = await supervisor.start(_spec("scheduler", _LISTENS))
    assert facts["address"] == "127.0.0.1:7777"
    assert (await events.wait("loading")).facts == {"done": 1, "total": 2}
    assert set(supervisor.pids) == {"scheduler"}
    await supervisor.stop()
    assert [event.kind for event in events.seen] == ["starting", "loading", "listening", "stopped"]


async def test_a_child_that_dies_at_its_start_shows_its_last_words(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, Events())
    with pytest.raises(Problem, match="gateway did not start: it ended with exit code 3") as caught:
        await supervisor.start(_spec("gateway", _DIES))
    assert caught.value.details == ("the port is taken",)
    await supervisor.stop()


async def test_a_child_that_never_listens_is_ended(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, Events())
    with pytest.raises(Problem, match=r"said nothing for 0\.2 s"):
        await supervisor.start(_spec("gateway", "import signal; signal.pause()", start_seconds=0.2))
    assert supervisor.pids == {}
    await supervisor.stop()


async def test_a_killed_child_comes_back_at_its_old_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_BACKOFF_SECONDS", 0.01)
    events = Events()
    supervisor = Supervisor(tmp_path, events)
    await supervisor.start(_spec("scheduler", _LISTENS, pins={"address": "ADDRESS"}))
    os.kill(supervisor.pids["scheduler"], signal.SIGKILL)
    died = await events.wait("died")
    assert died.facts["how"] == "was killed by SIGKILL"
    again = await events.wait("listening", count=2)
    assert again.facts["address"] == "127.0.0.1:7777"
    await supervisor.stop()
    assert supervisor.pids == {}


async def test_stops_in_reverse_order_and_kills_the_deaf(tmp_path: Path) -> None:
    events = Events()
    supervisor = Supervisor(tmp_path, events)
    await supervisor.start(_spec("valkey", _LISTENS))
    await supervisor.start(_spec("worker-1", _IGNORES_SIGTERM, stop_seconds=0.2))
    await supervisor.start(_spec("worker-2", _LISTENS))
    await supervisor.start(_spec("gateway", _LISTENS))
    await supervisor.stop()
    stopped = [event.child for event in events.seen if event.kind == "stopped"]
    assert stopped[0] == "gateway"
    assert set(stopped[1:3]) == {"worker-1", "worker-2"}
    assert stopped[3] == "valkey"


async def test_kill_ends_a_stop_that_waits(tmp_path: Path) -> None:
    events = Events()
    supervisor = Supervisor(tmp_path, events)
    await supervisor.start(_spec("valkey", _LISTENS))
    await supervisor.start(_spec("gateway", _IGNORES_SIGTERM, stop_seconds=3600))
    stop = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)  # the stop has begun
    supervisor.kill()
    await stop
    assert [event.kind for event in events.seen if event.kind in ("died", "restarting")] == []
    assert supervisor.pids == {}


async def test_a_line_longer_than_the_buffer_is_passed_over(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, Events())
    facts = await supervisor.start(_spec("worker-1", "print('x' * 300_000, flush=True)\n" + _LISTENS, start_seconds=20))
    assert facts["address"] == "127.0.0.1:7777"
    await supervisor.stop()


async def test_a_child_that_waits_to_start_again_stays_dead_in_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_BACKOFF_SECONDS", 0.1)
    events = Events()
    supervisor = Supervisor(tmp_path, events)
    await supervisor.start(_spec("worker-1", _LISTENS))
    await supervisor.start(_spec("gateway", _IGNORES_SIGTERM, stop_seconds=0.5))
    os.kill(supervisor.pids["worker-1"], signal.SIGKILL)
    await events.wait("died")
    await supervisor.stop()
    assert "restarting" not in [event.kind for event in events.seen]


async def test_a_child_that_is_being_made_is_not_missed_by_a_stop(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, Events())
    start = asyncio.create_task(supervisor.start(_spec("gateway", _IGNORES_SIGTERM, stop_seconds=3600)))
    for _ in range(2):  # the start has begun, and the making of the process
        await asyncio.sleep(0)
    start.cancel()
    assert supervisor.pids == {}
    await supervisor.stop()
    assert [child for child in psutil.Process().children() if str(_IGNORES_SIGTERM) in child.cmdline()] == []


async def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(supervisor_module, "_LOG_LOOK_SECONDS", 0.01)
    supervisor = Supervisor(tmp_path, Events())
    code = "import sys; print('x' * 2000, file=sys.stderr, flush=True)\n" + _LISTENS.replace("signal.pause()", "sys.stdin.read()")
    await supervisor.start(_spec("worker-1", code))
    await supervisor.stop()
    assert (tmp_path / "worker-1.log").read_text() == ""
    assert (tmp_path / "worker-1.log.1").read_text() == "x" * 2000 + "\n"


async def test_a_probed_child_is_up_when_its_probe_says_so(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def exists() -> bool:
        return flag.exists()

    code = f"import pathlib, signal; print('hello', flush=True); pathlib.Path({str(flag)!r}).touch(); signal.pause()"
    supervisor = Supervisor(tmp_path, Events())
    await supervisor.start(_spec("valkey", code, probe=exists))
    assert (tmp_path / "valkey.log").read_text() == "hello\n"
    await supervisor.stop()


def test_sigkill_of_the_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    program = f"""
import asyncio, json, pathlib, sys
from services.cli.supervisor import ChildSpec, Supervisor
async def main():
    supervisor = Supervisor(pathlib.Path({str(tmp_path)!r}), lambda event: None)
    for name in ("valkey", "worker-1", "gateway"):
        await supervisor.start(ChildSpec(name, (sys.executable, "-c", {_LISTENS!r})))
    print(json.dumps(supervisor.pids), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [psutil.Process(pid) for pid in json.loads(process.stdout.readline()).values()]
        process.kill()
    assert len(children) == 3
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_deathwatch_refuses_where_the_parent_is_dead_already() -> None:
    watch = Path(supervisor_module.__file__).with_name("deathwatch.py")
    # 1 is not this process: as if the parent had died and init had taken over.
    done = subprocess.run([sys.executable, str(watch), "1", sys.executable, "-c", "print('ran')"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (126, b"")
