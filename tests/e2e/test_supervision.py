"""The life of a whole mesh: it stops cleanly, leaves no orphan, heals, and explains what stands in its way."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.mesh import FOREBAY, Mesh, environment, living, running, wait_until


def _up(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*FOREBAY, "up", *arguments], env=environment(home), capture_output=True, text=True, check=False, timeout=60)


def test_ctrl_c_stops_everything_and_exits_with_0(tmp_path: Path) -> None:
    with running(tmp_path / "home") as mesh:
        assert set(living(mesh.processes)) == {"valkey", "scheduler", "worker-1", "gateway"}
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(timeout=45) == 0
    assert living(mesh.processes) == {}
    assert not (tmp_path / "home" / "mesh.json").exists()


def test_sigkill_leaves_no_orphan(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--workers", "2") as mesh:
        assert set(mesh.processes) == {"valkey", "scheduler", "worker-1", "worker-2", "gateway"}
        mesh.process.kill()
        wait_until(lambda: not living(mesh.processes), "every child has gone")


def test_a_killed_worker_comes_back(tmp_path: Path) -> None:
    with running(tmp_path / "home") as mesh:
        before = mesh.fleet()["workers"][0]["registration"]["incarnation"]
        os.kill(mesh.processes["worker-1"], signal.SIGKILL)

        def another_is_ready() -> bool:
            return any(worker["ready"] and worker["registration"]["incarnation"] != before for worker in mesh.fleet()["workers"])

        wait_until(another_is_ready, "a new incarnation is ready", seconds=60)
        done = mesh.forebay("run", "--temperature", "0", "--max-tokens", "16", "Name the capital of France.")
        assert "Paris" in done.stdout, done.stderr


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = _up(tmp_path / "home", "--http-port", str(port), "--grpc-port", "0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"forebay: port {port} on 127.0.0.1 is taken")
    assert "--http-port" in line


def test_a_second_mesh_from_one_folder_is_one_line(mesh: Mesh) -> None:
    done = _up(mesh.home, "--http-port", "0", "--grpc-port", "0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"pid {mesh.process.pid}" in line


@pytest.mark.parametrize("content", [b"", b"GGUF" + b"\xff" * 100])
def test_a_broken_model_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    done = _up(tmp_path / "home", "--http-port", "0", "--grpc-port", "0", "--model", str(file))
    assert done.returncode == 1
    assert "did not start" in done.stderr.splitlines()[-1]
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr
