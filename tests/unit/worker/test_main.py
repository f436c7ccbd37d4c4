"""`python -m services.worker` as a process: what it says when it can't, and how it stops."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import services.worker.__main__ as main_module
from services.common import rpc
from services.worker import loading
from services.worker.settings import WorkerSettings
from tests.worker_harness import ToyRunner, toy, until

ROOT = Path(__file__).parents[3]


def run_worker(**variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", **{f"FOREBAY_{key.upper()}": value for key, value in variables.items()}}
    command = [sys.executable, "-m", "services.worker"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"model": "/nowhere/x.gguf"}, "there is no file or folder /nowhere/x.gguf"),
        ({"model": __file__}, "test_main.py"),
        ({"model": __file__, "device": "cuda:99"}, "FOREBAY_DEVICE=cuda:99: torch "),
        ({"model": "m", "kv_memory": "lots"}, "FOREBAY_KV_MEMORY=lots: could not parse value and unit from byte string"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(variables: dict[str, str], line: str) -> None:
    ended = run_worker(**variables)
    assert ended.returncode == 1
    assert ended.stdout == ""
    [said] = ended.stderr.splitlines()
    assert said.startswith("forebay worker: ")
    assert line in said


async def test_a_worker_says_where_it_listens_and_drains_when_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, served = toy(ToyRunner())

    async def load(*_: object) -> loading.Loaded:
        return loading.Loaded([(engine, served)])

    monkeypatch.setattr(main_module, "load", load)
    said: list[dict[str, object]] = []
    monkeypatch.setattr(main_module, "announce", lambda event, **facts: said.append({"event": event, **facts}))
    stop = asyncio.Event()
    life = asyncio.create_task(main_module.serve(WorkerSettings(model="toy"), stop))
    await until(lambda: said)
    [line] = said
    assert (line["event"], line["service"]) == ("listening", "worker")
    async with rpc.channel(str(line["address"])) as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
    stop.set()
    await asyncio.wait_for(life, 10)


async def test_a_stop_while_loading_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        begun.set()
        go_on.wait()

    monkeypatch.setattr(loading, "_load_all", slow)
    stop = asyncio.Event()
    life = asyncio.create_task(main_module.serve(WorkerSettings(model="toy"), stop))
    await until(begun.is_set)
    stop.set()
    await asyncio.wait_for(life, 20)
    go_on.set()


def test_loading_is_told_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    progress = loading.Progress()
    for done in range(1001):
        progress(done, 1000)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == {"event": "loading", "done": 1000, "total": 1000}
    assert len(lines) < 100


def test_an_event_loop_that_is_stuck_ends_the_process_and_says_where() -> None:
    program = """
import asyncio, threading
import services.worker.__main__ as worker

async def main():
    guard = asyncio.create_task(worker.guard_event_loop())
    await asyncio.sleep(0)
    stuck_here()

def stuck_here():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

worker.STUCK_SECONDS = 0.1
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "stuck_here" in ended.stderr
