"""The state folder: one mesh at a time, and only a living one is found."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli import client
from services.cli.home import Home, Running
from services.cli.problem import Problem

RUNNING = Running(os.getpid(), "127.0.0.1:1", "http://127.0.0.1:2/v1", "a.b.c", ("tiny",), {"gateway": 3})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOREBAY_ADDRESS", raising=False)
    monkeypatch.delenv("FOREBAY_TOKEN", raising=False)
    found = Home.from_environment()
    found.make()
    return found


@pytest.fixture
def held(home: Home) -> Iterator[Home]:
    """As `forebay up` holds it."""
    with home.lock():
        yield home


def test_written_and_read_again(held: Home) -> None:
    held.write(RUNNING)
    assert held.read() == RUNNING
    assert stat.S_IMODE((held.path / "mesh.json").stat().st_mode) == 0o600
    held.clear()
    assert held.read() is None


def test_a_dead_supervisor_is_no_mesh(home: Home) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    home.write(replace(RUNNING, pid=done.pid))
    assert home.read() is None


def test_a_pid_that_is_another_programs_by_now_is_no_mesh(home: Home) -> None:
    home.lock().close()
    home.write(RUNNING)
    assert home.read() is None


def test_logs_are_private_in_a_folder_of_any_mode(home: Home) -> None:
    for folder in (home.path, home.logs):
        folder.chmod(0o755)
    home.make()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o755
    assert stat.S_IMODE(home.logs.stat().st_mode) == 0o700


def test_a_second_mesh_is_refused_with_the_first_ones_pid(home: Home) -> None:
    with home.lock():
        home.write(RUNNING)
        with pytest.raises(Problem, match=rf"already up .*pid {os.getpid()}.*FOREBAY_HOME"):
            home.lock()
    home.lock().close()


def test_a_client_finds_the_mesh_that_is_up(held: Home) -> None:
    held.write(RUNNING)
    assert client.find() == client.Target("127.0.0.1:1", "a.b.c")


def test_the_environment_wins(held: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    held.write(RUNNING)
    monkeypatch.setenv("FOREBAY_ADDRESS", "mesh:50051")
    assert client.find() == client.Target("mesh:50051", "a.b.c")
    monkeypatch.setenv("FOREBAY_TOKEN", "other")
    assert client.find() == client.Target("mesh:50051", "other")


def test_no_mesh_says_what_to_do(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Problem, match="start one with `forebay up`"):
        client.find()
    monkeypatch.setenv("FOREBAY_ADDRESS", "mesh:50051")
    with pytest.raises(Problem, match="FOREBAY_TOKEN isn't"):
        client.find()
