"""One thread of another process made to stand still while the rest runs on: a hang, which no signal makes. Root on Linux."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL = 0x40000000  # __WALL: threads, too
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def busiest_thread(pid: int) -> Iterator[None]:
    """While the block lasts, of the process's threads but its first the one that used most CPU time doesn't run. OSError where it can't be.

    The process may end meanwhile, and is then no zombie for it: its thread is waited for.
    """
    begun, over = threading.Event(), threading.Event()
    failures: list[OSError] = []
    holder = threading.Thread(target=_hold, args=(_busiest(pid), begun, over, failures))  # the kernel knows a tracer by its thread
    holder.start()
    begun.wait()
    try:
        if failures:
            raise failures[0]
        yield
    finally:
        over.set()
        holder.join()


def _busiest(pid: int) -> int:
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir() if path.name != str(pid)]
    return max(threads, key=lambda thread: _ticks(Path(f"/proc/{pid}/task/{thread}/stat").read_text()))


def _ticks(stat: str) -> int:
    user, system = stat.rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def _hold(thread: int, begun: threading.Event, over: threading.Event, failures: list[OSError]) -> None:
    try:
        _ptrace(_SEIZE, thread)
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _ALL)  # it has stopped
    except OSError as error:
        failures.append(error)
        begun.set()
        return
    begun.set()
    while not over.wait(0.1):
        ended, status = os.waitpid(thread, _ALL | os.WNOHANG)
        if ended and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            return
    _libc.ptrace(_DETACH, thread, None, None)


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace of thread {thread}: {os.strerror(number)}")
