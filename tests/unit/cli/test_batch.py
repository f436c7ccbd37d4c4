"""`forebay batch`: what is asked of the mesh, and what is shown."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.v1 import batch_pb2
from services.cli.app import app
from services.cli.problem import Problem, Usage
from tests.unit.cli.gateway import Gateway

LINES = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n' * 5000


def run(*arguments: str) -> tuple[str, str]:
    """Standard output and standard error."""
    result = CliRunner().invoke(app, ["batch", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(LINES)
    return str(path)


def test_submit_sends_the_file_and_prints_the_id(gateway: Gateway, file: str) -> None:
    assert run("submit", file, "--hours", "2", "--metadata", "for=me") == ("batch_1\n", "")
    ((header, lines),) = gateway.acts
    assert (header.endpoint, header.window_hours, dict(header.metadata), header.filename) == (
        "/v1/completions",
        2,
        {"for": "me"},
        "mine.jsonl",
    )
    assert lines == LINES
    assert header.idempotency_key
    run("submit", file, "--key", "k", "--endpoint", "/v1/chat/completions")
    assert (gateway.acts[1][0].idempotency_key, gateway.acts[1][0].endpoint) == ("k", "/v1/chat/completions")
    assert json.loads(run("submit", file, "--json")[0])["batch_id"] == "batch_1"


def test_what_can_t_be_submitted(gateway: Gateway, tmp_path: Path, file: str) -> None:
    (tmp_path / "odd").write_bytes(b"[1]\n")
    with pytest.raises(Usage, match="the first line names no url"):
        run("submit", str(tmp_path / "odd"))
    with pytest.raises(Usage, match="--metadata is x: it must be NAME=TEXT"):
        run("submit", file, "--metadata", "x")
    with pytest.raises(FileNotFoundError):
        run("submit", str(tmp_path / "none"))
    assert not gateway.acts


def test_waiting_tells_how_it_ended(gateway: Gateway, file: str) -> None:
    runs = batch_pb2.Batch(batch_id="batch_1", status=batch_pb2.BATCH_STATUS_IN_PROGRESS)
    gateway.batches = [runs, batch_pb2.Batch(batch_id="batch_1", status=batch_pb2.BATCH_STATUS_COMPLETED, num_lines=2, num_completed=2)]
    out, notes = run("submit", file, "--wait")
    assert (out, notes) == ("batch_1\n", "batch_1 is completed: 2 of 2 lines answered, 0 failed\n")
    failed = batch_pb2.Batch(batch_id="batch_1", status=batch_pb2.BATCH_STATUS_FAILED)
    failed.errors.add(line=3, message="no")
    gateway.batches = [failed]
    with pytest.raises(Problem, match="batch_1 is failed") as caught:
        run("submit", file, "--wait")
    assert caught.value.details == ("line 3: no",)


def test_status(gateway: Gateway) -> None:
    title, row = run("status", "batch_1")[0].splitlines()
    assert title.split()[:4] == ["id", "status", "lines", "answered"]
    assert row.split()[:5] == ["batch_1", "in_progress", "1,200", "30", "2"]
    assert run("status")[0] == "no jobs\n"
    gateway.batches = [batch_pb2.Batch(batch_id="batch_2", status=batch_pb2.BATCH_STATUS_IN_PROGRESS, waiting_for="storage")]
    assert "batch_2 in_progress (waits for storage)" in " ".join(run("status")[0].split())
    gateway.batches = []
    assert json.loads(run("status", "batch_1", "--json")[0])["num_lines"] == "1200"
    with pytest.raises(Problem, match="NOT_FOUND: there is no batch"):
        run("status", "none")


def test_cancel_and_results(gateway: Gateway) -> None:
    assert run("cancel", "batch_1")[0] == "batch_1 is cancelling: 30 of 1200 lines answered, 2 failed\n"
    assert run("results", "batch_1", "--follow") == ('{"line": 2}\n{"line": 1}\n', "")
    assert gateway.acts[-1].follow
