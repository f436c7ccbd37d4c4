"""Log lines where nobody takes them: dropped, counted, and told of once they are taken again."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import log_lines
from services.common.log_lines import LineHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def say(handler: LineHandler, *words: str) -> None:
    for word in words:
        handler.emit(logging.LogRecord("l", logging.INFO, "f", 1, word, None, None))


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    handler = LineHandler(pipe[1])
    say(handler, "one", "two")
    assert os.read(pipe[0], 100) == b"one\ntwo\n"


def test_a_pipe_that_nobody_reads_holds_nobody_up(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = log_lines.select.select
    monkeypatch.setattr(log_lines.select, "select", lambda r, w, x, seconds: waits.append(seconds) or real(r, w, x, 0))
    handler = LineHandler(pipe[1])
    say(handler, *(f"{number:01000d}" for number in range(100)))
    assert handler.num_dropped >= 30
    assert len(waits) == 1, "only the first line waits for its reader"
    dropped = handler.num_dropped
    while len(os.read(pipe[0], 4096)) == 4096:
        pass
    say(handler, "again")
    assert os.read(pipe[0], 4096).decode() == f"{dropped} log lines could not be written\nagain\n"
    assert handler.num_dropped == 0


def test_a_full_disk_is_no_error() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        handler = LineHandler(full.fileno())
        say(handler, "one", "two")
        assert handler.num_dropped == 2


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = LineHandler(writer)
    say(handler, "one")
    assert handler.num_dropped == 1
    os.close(writer)
