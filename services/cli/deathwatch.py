"""Starts a program that the kernel kills when its parent dies: `python deathwatch.py PARENT_PID PROGRAM [ARGUMENT...]`.

Run by file path and built on the standard library alone, so that it costs a bare interpreter start. It then becomes the program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for SIGKILL at the parent's death and becomes the program. Exits 126 where the parent is dead already."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died between its fork and the request above; then no signal ever comes.
    if os.getppid() != parent:
        sys.exit(126)
    os.execvp(program[0], program)  # noqa: S606  # replaces this process; there is nothing for a shell to do


if __name__ == "__main__":
    main()
