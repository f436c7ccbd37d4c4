"""The flight record: what a process died with is read by the next one; what ended well leaves nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker import flight_record
from services.worker.engine.batch import Batch
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import EngineRequest, SamplingParams, SequenceError
from services.worker.flight_record import FlightRecord, InFlight, RecordedRunner
from tests.fake_runner import fake_engine

ROOT = Path(__file__).parents[3]


def recorded(path: Path, before_execute: Callable[[Batch], None]) -> tuple[FlightRecord, Callable[[], None]]:
    """A record, and a run of two requests of which one has got 2 tokens more."""
    record = FlightRecord(path)
    engine = fake_engine(EngineConfig(num_blocks=32, block_size=4), before_execute=before_execute)
    engine.runner = RecordedRunner(engine.runner, record)

    def run() -> None:
        engine.add(EngineRequest("a#1", [1, 2], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), n=2))
        engine.step(0.0)
        engine.step(0.0)
        engine.add(EngineRequest("b#7", [3], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
        while engine.has_work:
            engine.step(0.0)

    return record, run


def test_what_a_step_died_of_is_found_by_the_next_start(tmp_path: Path) -> None:
    def die(batch: Batch) -> None:
        if any(span.sequence.request_id == "b#7" for span in batch.spans):
            raise RuntimeError("the device is gone")

    _, run = recorded(tmp_path / "record", die)
    with pytest.raises(RuntimeError):
        run()
    assert FlightRecord(tmp_path / "record").before == [InFlight("a", 1, 2), InFlight("b", 7, 0)]
    assert FlightRecord(tmp_path / "record").before == [], "it is told once"


def test_steps_that_end_leave_nothing(tmp_path: Path) -> None:
    _, run = recorded(tmp_path / "record", lambda _: None)
    run()
    assert FlightRecord(tmp_path / "record").before == []


def test_an_error_of_one_request_alone_leaves_nothing(tmp_path: Path) -> None:
    def refuse(batch: Batch) -> None:
        if any(span.sequence.request_id == "b#7" for span in batch.spans):
            raise SequenceError("b#7", 0, "NaN")

    _, run = recorded(tmp_path / "record", refuse)
    run()
    assert FlightRecord(tmp_path / "record").before == []


def test_it_outlives_sigkill(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from tests.unit.worker.test_flight_record import recorded

_, run = recorded(Path(sys.argv[1]), lambda batch: len(batch.spans) == 3 and os.kill(os.getpid(), signal.SIGKILL))
run()
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    command = [sys.executable, "-c", program, str(tmp_path / "record")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert FlightRecord(tmp_path / "record").before == [InFlight("a", 1, 2), InFlight("b", 7, 0)]


@pytest.mark.parametrize("content", [b"\xff" * 100, b"\x05\0\0\0abcde", b"\x04\0\0\0a 1\n", b"", b"\x08\0\0\0a#x 1\n\n\n"])
def test_what_makes_no_sense_is_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record").write_bytes(content)
    assert FlightRecord(tmp_path / "record").before == []


def test_somebody_elses_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "record").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="record"):
        FlightRecord(tmp_path / "record")


def test_more_than_fits_is_cut_at_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_record, "_SIZE", 1000)
    record = FlightRecord(tmp_path / "record")
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4))
    for number in range(30):
        engine.add(EngineRequest(f"{'x' * 100}{number}#1", [1], SamplingParams(max_tokens=2, temperature=0)))
    record.begins(engine.batcher.schedule(0.0))
    assert [entry.request_id[100:] for entry in FlightRecord(tmp_path / "record").before] == list("012345678")
