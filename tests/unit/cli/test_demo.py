"""The demo's verdict: right answers exit with 0, a wrong one with 1 and the face that gave it."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.cli import demo
from services.cli.app import app
from services.cli.ask import Answer
from services.cli.home import Running
from services.cli.problem import Problem


class NoMesh:
    """Starts nothing."""

    def __init__(self, *_: Any) -> None:
        self.stopped = False

    async def start(self) -> Running:
        return Running(1, "127.0.0.1:1", "http://127.0.0.1:2/v1", "token", ("tiny",))

    async def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(("by_http", "exit_code", "words"), [("Paris.", 0, ""), ("London.", 1, "no 'Paris' in the answer over HTTP")])
def test_verdict(monkeypatch: pytest.MonkeyPatch, by_http: str, exit_code: int, words: str) -> None:
    async def ask_grpc(_: Running) -> Answer:
        return Answer(text="It is Paris.")

    async def ask_http(_: Running) -> Answer:
        return Answer(text=by_http)

    monkeypatch.setattr(demo, "Mesh", NoMesh)
    monkeypatch.setattr(demo, "_ask_grpc", ask_grpc)
    monkeypatch.setattr(demo, "_ask_http", ask_http)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == exit_code
    assert words in result.stderr


async def _hang() -> None:
    await asyncio.Event().wait()


async def _break() -> None:
    raise httpx.ReadError("the connection was reset")


async def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (_hang, "no whole answer over gRPC within 0.01 s"),
        (_break, "no answer over gRPC: ReadError the connection was reset"),
        (_interrupt, None),
    ],
)
def test_a_mesh_that_gives_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: Any, words: str | None) -> None:
    async def ask_grpc(_: Running) -> Answer:
        await failing()
        raise AssertionError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "Mesh", NoMesh)
    monkeypatch.setattr(demo, "_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(demo, "_ask_grpc", ask_grpc)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code != 0
    if words is None:
        assert list(tmp_path.iterdir()) == [], "Ctrl-C leaves nothing"
    else:
        assert isinstance(result.exception, Problem)
        assert str(result.exception) == words
        assert len(list(tmp_path.iterdir())) == 1, "a failure leaves its logs"


def test_a_stream_of_chunks_becomes_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer()
    for chunk in (
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Par"}}]},
        {"choices": [{"delta": {"content": "is"}}]},
        {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}},
    ):
        demo._take_chunk(answer, chunk, start=0.0)
    assert answer.text == "Paris" == capsys.readouterr().out
    assert answer.usage["completion_tokens"] == 2
    assert answer.ttft_seconds > 0
