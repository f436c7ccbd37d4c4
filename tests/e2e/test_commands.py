"""`forebay run`, `ps` and `models` against a real mesh, and the lines that `up` says to paste."""

import json
import subprocess

import httpx
import pytest

from services.cli import screen
from services.cli.home import Home
from tests.e2e.mesh import FOREBAY, Mesh, wait_until
from tests.unit.cli.terminal import CTRL_C, CTRL_D, Terminal


def test_run_prints_the_answer_alone(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--temperature", "0", "--max-tokens", "32", "Name the capital of France.")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_run_verbose_tells_the_rest_on_stderr(mesh: Mesh) -> None:
    done = mesh.forebay("run", "-v", "--temperature", "0", "--seed", "5", "--max-tokens", "8", "Hello")
    assert done.returncode == 0
    for word in ("time to first token", "tokens/s", "request ", "seed 5", "prompt tokens"):
        assert word in done.stderr


def test_run_json(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--json", "--temperature", "0", "--max-tokens", "8", "-", text="Name the capital of France.")
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] <= 8
    assert answer["ttft_seconds"] > 0
    assert answer["finish_reason"] in ("stop", "length")


def test_explain_tells_where_the_time_of_a_request_went(mesh: Mesh) -> None:
    answer = json.loads(mesh.forebay("run", "--json", "--temperature", "0", "--max-tokens", "8", "Name the capital of France.").stdout)
    request_id = answer["request_id"]
    wait_until(lambda: mesh.forebay("explain", request_id).returncode == 0, "the record is there")
    record = json.loads(mesh.forebay("explain", "--json", request_id).stdout)
    (attempt,) = record["attempts"]
    parts = [part["seconds"] for part in attempt["parts"]]
    assert record["admit_seconds"] + sum(parts) == pytest.approx(record["total_seconds"])
    kinds = [event["kind"].removeprefix("TIMELINE_EVENT_KIND_") for event in attempt["timeline"]["events"]]
    assert (kinds[0], kinds[-1]) == ("ADMITTED", "ENDED")
    assert {"PREFILL", "FIRST_TOKEN"} <= set(kinds)
    (candidate,) = attempt["decision"]["candidates"]
    assert candidate["chosen"]
    assert {term["name"] for term in candidate["cost"]} == {"waiting", "preempted", "prefill", "load", "rivals", "cache"}
    shown = mesh.forebay("explain", request_id).stdout
    assert all(word in shown for word in ("queue", "decode", "worker-1", "chosen", "first token"))
    assert "France" not in json.dumps(record)
    unknown = mesh.forebay("explain", "nobody")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (1, 1)


def test_a_question_may_come_through_a_pipe(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--temperature", "0", "--max-tokens", "16", text="Name the capital of France.\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_a_chat_goes_on_after_an_answer_is_cut(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(mesh.home))
    with Terminal(*FOREBAY, "run", "--temperature", "0") as terminal:
        terminal.expect("> ")
        terminal.keys("Count from one to a thousand.\n")
        terminal.expect("\n")  # the echo
        terminal.expect(" ")
        terminal.keys(CTRL_C)
        terminal.expect("\n> ")
        mesh.wait_until_idle()
        terminal.keys("/clear\n")
        terminal.expect("\n> ")
        terminal.keys("Name the capital of France.\n")
        terminal.expect("Paris")
        terminal.expect("\n> ")
        terminal.keys(CTRL_D)
        assert terminal.exit_code() == 0


def test_a_refusal_is_one_line(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--max-tokens", "1000000", "Hello")
    assert done.returncode == 1
    assert done.stderr.startswith("forebay: INVALID_ARGUMENT")
    assert "max_tokens" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ps(mesh: Mesh) -> None:
    (worker,) = mesh.fleet()["workers"]
    assert worker["registration"]["worker_id"] == "worker-1"
    assert worker["ready"]
    assert worker["heartbeat"]["memory_total_bytes"] != "0"
    for address in mesh.fleet()["internal_addresses"].values():
        assert httpx.get(f"http://{address}/metrics").is_success
    assert set(mesh.fleet()["internal_addresses"]) == {"scheduler", "worker-1", "gateway"}
    table = mesh.forebay("ps").stdout
    assert "worker-1" in table
    assert "ready" in table


def test_models(mesh: Mesh) -> None:
    embedding, model = json.loads(mesh.forebay("models", "--json").stdout)["models"]
    assert (embedding["name"], embedding["capabilities"], model["capabilities"]) == ("all-minilm-l6-v2", ["embed"], ["generate"])
    assert model["name"] == mesh.model
    assert model["ready"]
    assert mesh.model in mesh.forebay("models").stdout


def test_the_lines_to_paste_work(mesh: Mesh) -> None:
    running = Home(mesh.home).read()
    assert running is not None
    for line in (screen.curl_line(running), screen.python_line(running)):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
