"""Log lines to a file descriptor that may take none: a pipe that nobody reads, a full disk. Those are dropped and counted."""

import logging
import os
import select
import stat

PATIENCE_SECONDS = 0.1
"""So long a line waits for its reader, once; what follows doesn't until one line got through."""


class LineHandler(logging.Handler):
    """Writes each record in one piece."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        mode = os.fstat(descriptor).st_mode
        self._may_block = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        if self._may_block:
            os.set_blocking(descriptor, False)
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        said = f"{self.num_dropped} log lines could not be written\n" if self.num_dropped else ""
        if self._write(f"{said}{line}\n".encode(errors="replace")):
            self.num_dropped = 0
        else:
            self.num_dropped += 1

    def _write(self, text: bytes) -> bool:
        """False where nothing of it was taken; the rest of a line that was begun is waited for."""
        begun = False
        while text:
            try:
                taken = os.write(self._descriptor, text)
            except BlockingIOError:
                if self.num_dropped or not select.select([], [self._descriptor], [], PATIENCE_SECONDS)[1]:
                    return begun
                continue
            except OSError:
                return begun
            begun, text = True, text[taken:]
        return True
