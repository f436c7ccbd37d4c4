"""The state folder (~/.forebay or FOREBAY_HOME): who runs a mesh from it now, and where that mesh is to be found."""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from services.cli.problem import Problem


@dataclass(frozen=True)
class Running:
    """A mesh that is up, as its supervisor wrote it down."""

    pid: int
    grpc_address: str
    http_base_url: str
    token: str
    models: tuple[str, ...] = ()
    processes: Mapping[str, int] = field(default_factory=dict)
    internal_addresses: Mapping[str, str] = field(default_factory=dict)
    """host:port of /metrics, /health and /ready, by process."""


@dataclass(frozen=True)
class Home:
    """One state folder. What is secret in it is private whatever the mode of the folder."""

    path: Path

    @classmethod
    def from_environment(cls) -> "Home":
        """FOREBAY_HOME, else ~/.forebay."""
        return cls(Path(os.environ.get("FOREBAY_HOME") or "~/.forebay").expanduser().resolve())

    @property
    def keys(self) -> Path:
        """Key, JWKS file and token."""
        return self.path / "keys"

    @property
    def certs(self) -> Path:
        """CA, certificates and keys of mutual TLS."""
        return self.path / "certs"

    @property
    def logs(self) -> Path:
        """One log per child of the last start."""
        return self.path / "logs"

    @property
    def valkey(self) -> Path:
        """Append-only file and socket."""
        return self.path / "valkey"

    def make(self) -> None:
        """Makes the folder and its log folder."""
        try:
            for folder in (self.path, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.chmod(0o700)  # ours alone; the folder itself may be one that the person shares
        except OSError as error:
            raise Problem(f"cannot make {self.path}: {error.strerror}. Set FOREBAY_HOME to a folder of yours") from error

    def lock(self) -> IO[str]:
        """Holds the folder until the returned file is closed. Problem where another mesh holds it."""
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            running = self.read()
            who = f" (pid {running.pid}, {running.http_base_url})" if running else ""
            raise Problem(f"a mesh is already up from {self.path}{who}: stop it, or set FOREBAY_HOME to another folder") from error
        return file

    def write(self, running: Running) -> None:
        """Says where the mesh is; mode 0600, for the token in it."""
        draft = self._state.with_name("mesh.json.new")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(running), file, indent=2)
        draft.replace(self._state)

    def clear(self) -> None:
        """The mesh is down."""
        self._state.unlink(missing_ok=True)

    def read(self) -> Running | None:
        """The mesh that was last written down, if its supervisor still lives."""
        try:
            facts = json.loads(self._state.read_text())
            running = Running(**{**facts, "models": tuple(facts["models"])})
            os.kill(running.pid, 0)
            # The pid may be another's by now; the lock can't be.
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return running
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    @property
    def _state(self) -> Path:
        return self.path / "mesh.json"
