"""`forebay run`, `ps` and `models` against a real mesh, and the lines that `up` says to paste."""

import json
import subprocess

from services.cli import screen
from services.cli.home import Home
from tests.e2e.mesh import Mesh


def test_run_prints_the_answer_alone(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--temperature", "0", "--max-tokens", "32", "What is the capital of France?")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_run_verbose_tells_the_rest_on_stderr(mesh: Mesh) -> None:
    done = mesh.forebay("run", "-v", "--temperature", "0", "--seed", "5", "--max-tokens", "8", "Hello")
    assert done.returncode == 0
    for word in ("time to first token", "tokens/s", "request ", "seed 5", "prompt tokens"):
        assert word in done.stderr


def test_run_json(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--json", "--temperature", "0", "--max-tokens", "8", "-", text="What is the capital of France?")
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] <= 8
    assert answer["ttft_seconds"] > 0
    assert answer["finish_reason"] in ("stop", "length")


def test_a_chat_goes_on_until_the_end_of_input(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--temperature", "0", "--max-tokens", "16", text="What is the capital of France?\n/clear\nHello\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_a_refusal_is_one_line(mesh: Mesh) -> None:
    done = mesh.forebay("run", "--temperature", "1000", "Hello")
    assert done.returncode == 1
    assert done.stderr.startswith("forebay: INVALID_ARGUMENT")
    assert "temperature" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ps(mesh: Mesh) -> None:
    (worker,) = mesh.fleet()["workers"]
    assert worker["registration"]["worker_id"] == "worker-1"
    assert worker["ready"]
    assert worker["heartbeat"]["memory_total_bytes"] != "0"
    table = mesh.forebay("ps").stdout
    assert "worker-1" in table
    assert "ready" in table


def test_models(mesh: Mesh) -> None:
    (model,) = json.loads(mesh.forebay("models", "--json").stdout)["models"]
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
