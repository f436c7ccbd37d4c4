"""What `forebay up` shows: lines that paste whatever the window's width, and steps that read well in a pipe."""

import io
import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from services.cli import screen
from services.cli.home import Running
from services.cli.supervisor import Event

RUNNING = Running(1, "127.0.0.1:50051", "http://127.0.0.1:8000/v1", "abc." * 50, ("tiny",))


def test_lines_to_paste_are_never_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_box(Console(width=30), RUNNING)
    printed = capsys.readouterr().out.splitlines()
    for line in (RUNNING.token, screen.curl_line(RUNNING), screen.python_line(RUNNING)):
        assert line in printed


def test_the_box_tells_where_everything_is() -> None:
    running = replace(RUNNING, internal_addresses={"gateway": "127.0.0.1:40001", "worker-1": "127.0.0.1:40002"})
    out = io.StringIO()
    screen.print_box(Console(file=out, width=100), running)
    assert "metrics  127.0.0.1:40001 (gateway), 127.0.0.1:40002 (worker-1)" in out.getvalue()
    assert "HTTP     http://127.0.0.1:8000/v1" in out.getvalue()


def test_the_curl_line_is_a_shell_line_with_json_in_it() -> None:
    words = shlex.split(screen.curl_line(RUNNING))
    assert words[0] == "curl"
    assert f"Authorization: Bearer {RUNNING.token}" in words
    body = json.loads(words[-1])
    assert (body["model"], body["temperature"]) == ("tiny", 0)


def test_the_python_line_is_python() -> None:
    _, option, code = shlex.split(screen.python_line(RUNNING))
    assert option == "-c"
    compile(code, "line", "exec")
    assert "temperature=0" in code


def test_in_a_pipe_each_step_is_one_line() -> None:
    out = io.StringIO()
    with screen.StepList(Console(file=out, width=100)) as steps:
        steps.hear(Event("worker-1", "starting"))
        steps.hear(Event("worker-1", "loading", {"done": 1, "total": 2}))
        steps.hear(Event("worker-1", "listening", {"address": "x"}))
    assert out.getvalue() == "✓ worker-1\n"


def test_after_the_start_a_death_and_a_return_are_reported() -> None:
    out = io.StringIO()
    steps = screen.StepList(Console(file=out, width=200))
    with steps:
        steps.hear(Event("gateway", "starting"))
    steps.hear(Event("gateway", "died", {"how": "was killed by SIGKILL", "backoff_seconds": 0.5, "log": "/x/gateway.log"}))
    steps.hear(Event("gateway", "loading", {"done": 1, "total": 2}))
    steps.hear(Event("gateway", "listening"))
    assert out.getvalue().splitlines() == [
        "gateway was killed by SIGKILL; it starts again in 0.5 s. Its log: /x/gateway.log",
        "gateway is back",
    ]


def test_json_events_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen.json_listener()(Event("worker-1", "loading", {"done": 1, "total": 2}))
    assert json.loads(capsys.readouterr().out) == {"event": "loading", "child": "worker-1", "done": 1, "total": 2}
