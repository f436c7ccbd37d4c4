"""The command at a terminal, as a person has it: a pty that the process is at the other end of."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

CTRL_C, CTRL_D = "\x03", "\x04"
# Takes the pty for its controlling terminal, so that Ctrl-C is a signal there.
_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
_SECONDS = 30


class Terminal:
    """Runs a command from entering to leaving. `seen` is what it has shown so far."""

    def __init__(self, *command: str) -> None:
        self._command = (sys.executable, "-c", _TAKE_TERMINAL, *command)
        self.seen = ""
        self._at = 0

    def __enter__(self) -> "Terminal":
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "dumb"}
        self._process = subprocess.Popen(self._command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment)
        os.close(slave)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def keys(self, text: str) -> None:
        """Types. Ctrl-C waits until the process sleeps: between a prompt and its select, CPython's readline loses it until the next key."""
        deadline = time.monotonic() + _SECONDS
        while CTRL_C in text and not self._sleeps():
            assert time.monotonic() < deadline, f"it never waits for anybody: {self.seen!r}"
        os.write(self._master, text.encode())

    def expect(self, text: str) -> None:
        """Reads until `text` has come, and takes the next `expect` from there."""
        deadline = time.monotonic() + _SECONDS
        while (found := self.seen.find(text, self._at)) < 0:
            ended = self._process.poll() is not None
            assert time.monotonic() < deadline, f"never came: {text!r}; there was {self.seen!r}"
            assert self._read(0.1) or not ended, f"ended without {text!r}: {self.seen!r}"
        self._at = found + len(text)

    def exit_code(self) -> int:
        """Reads on to the end."""
        deadline = time.monotonic() + _SECONDS
        while self._process.poll() is None or self._read(0):
            assert time.monotonic() < deadline, f"it goes on: {self.seen!r}"
            self._read(0.1)
        return self._process.returncode

    def _sleeps(self) -> bool:
        """Whether its main thread waits for something (proc(5): the state after the name in brackets)."""
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    def _read(self, seconds: float) -> str:
        ready, _, _ = select.select([self._master], [], [], seconds)
        try:
            new = os.read(self._master, 65536).decode(errors="replace") if ready else ""
        except OSError:  # Linux's word for the end: nobody has the other side open
            new = ""
        self.seen += new
        return new
