"""What the step that runs now holds, in a mapped file that outlives the process: who died with it, should it die.

Knows no RPC. Written twice per step: what it holds, and that it is over.
"""

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.worker.engine.batch import Batch, Runner, SpanResult
from services.worker.engine.request import SequenceError

_SIZE = 256 << 10  # bytes of the file; what doesn't fit isn't remembered
_LENGTH = struct.Struct("<I")


class InFlight(NamedTuple):
    """A request in a step, and the output tokens that it had then, of the choice that had most."""

    request_id: str
    epoch: int
    num_output_tokens: int


class FlightRecord:
    """`before` is what the last process with this file died with. OSError where the file can't be made or is somebody else's."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self.before = self._read()
        self.over()

    def begins(self, batch: Batch) -> None:
        """A step with this batch runs from now on."""
        most: dict[str, int] = {}
        for span in batch.spans:
            name = span.sequence.request_id
            most[name] = max(most.get(name, 0), span.sequence.num_output_tokens)
        text = b"".join(b"%s %d\n" % (name.encode(), tokens) for name, tokens in most.items())
        text = text[: text.rfind(b"\n", 0, _SIZE - _LENGTH.size) + 1]
        # A process that ends between these lines leaves an empty record, not a wrong one.
        self._map[_LENGTH.size : _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._map, 0, len(text))

    def over(self) -> None:
        """The step has ended."""
        _LENGTH.pack_into(self._map, 0, 0)

    def _read(self) -> list[InFlight]:
        """Empty where there is nothing, or nothing that makes sense."""
        (length,) = _LENGTH.unpack_from(self._map)
        try:
            lines = self._map[_LENGTH.size : _LENGTH.size + length].decode().splitlines()
            return [_parsed(line) for line in lines]
        except ValueError:
            return []


def _parsed(line: str) -> InFlight:
    name, tokens = line.rsplit(" ", 1)
    request_id, epoch = name.rsplit("#", 1)  # as wire.engine_id joins them
    return InFlight(request_id, int(epoch), int(tokens))


class RecordedRunner:
    """A runner whose steps are written down while they run. One that raises stays there: the process ends by it."""

    def __init__(self, runner: Runner, record: FlightRecord) -> None:
        self._record = record
        self._runner = runner
        self.copy: Callable[[Batch], None] = runner.copy

    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner."""
        self._record.begins(batch)
        try:
            results = self._runner.execute(batch)
        except SequenceError:  # which costs one request and no process
            self._record.over()
            raise
        self._record.over()
        return results
