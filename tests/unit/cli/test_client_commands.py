"""`run`, `ps` and `models` against a gateway in this process: what they send, what they print."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.v1 import types_pb2
from services.cli import client
from services.cli.app import app
from services.cli.home import Home, Running
from services.cli.problem import Problem, Usage
from tests.unit.cli.gateway import Gateway


def _run(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=text, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_run_sends_what_was_asked_and_nothing_else(gateway: Gateway) -> None:
    out = _run("run", "--system", "Be brief.", "--temperature", "0", "--seed", "3", "--class", "batch", "Capital of France?")
    assert out == "Paris\n"
    (request,) = gateway.asked
    assert [(message.role, message.content) for message in request.messages] == [("system", "Be brief."), ("user", "Capital of France?")]
    assert request.latency_class == types_pb2.LATENCY_CLASS_BATCH
    assert {field.name: value for field, value in request.sampling.ListFields()} == {"temperature": 0, "seed": 3, "max_tokens": 512}
    assert gateway.tokens == ["Bearer secret"]


@pytest.mark.parametrize(("options", "sent"), [((), 512), (("--max-tokens", "7"), 7), (("--max-tokens", "0"), None)])
def test_an_answer_is_limited_unless_it_is_told_not_to_be(gateway: Gateway, options: tuple[str, ...], sent: int | None) -> None:
    _run("run", *options, "Hello")
    (request,) = gateway.asked
    assert (request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None) == sent
    assert request.sampling.temperature == pytest.approx(0.2)


def test_the_limit_that_nobody_asked_for_gives_way_to_the_context(gateway: Gateway) -> None:
    assert _run("run", "little room") == "Paris\n"
    assert [request.sampling.HasField("max_tokens") for request in gateway.asked] == [True, False]
    with pytest.raises(Problem, match="max_tokens is 512: there is room for 100"):
        _run("run", "--max-tokens", "512", "little room")


def test_an_answer_that_this_limit_cut_says_so(gateway: Gateway) -> None:
    result = CliRunner().invoke(app, ["run", "long"])
    assert (result.stdout, result.stderr) == ("Paris\n", "(cut at 2 tokens: --max-tokens takes another limit, 0 for none)\n")
    assert CliRunner().invoke(app, ["run", "--max-tokens", "2", "long"]).stderr == ""


def test_what_is_piped_in_is_the_prompt(gateway: Gateway) -> None:
    assert _run("run", text="Capital of\nFrance?\n") == "Paris\n"
    assert gateway.asked[0].messages[0].content == "Capital of\nFrance?"
    with pytest.raises(Usage, match="the prompt is empty"):
        _run("run", text="")


def test_facts_are_never_wrapped(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    first, second, third = CliRunner().invoke(app, ["run", "-v", "Hello"]).stderr.splitlines()
    assert first.startswith("time to first token")
    assert second == "5 prompt tokens (1 cached), 2 generated, class standard"
    assert third == "request r-1, model tiny@fp32, seed 9, fingerprint f"


def test_a_class_that_the_org_may_not_have_is_told(gateway: Gateway) -> None:
    facts = CliRunner().invoke(app, ["run", "-v", "--class", "realtime", "Hello"]).stderr
    assert "2 generated, class standard (the org may not have realtime)" in facts
    answer = json.loads(_run("run", "--json", "--class", "realtime", "Hello"))
    assert (answer["latency_class"], answer["lowered_from"]) == ("standard", "realtime")
    assert json.loads(_run("run", "--json", "Hello"))["lowered_from"] == ""
    assert gateway.asked[-1].latency_class == types_pb2.LATENCY_CLASS_UNSPECIFIED, "the org's own"


def test_an_error_starts_on_a_line_of_its_own(gateway: Gateway) -> None:
    result = CliRunner().invoke(app, ["run", "break"])
    assert result.stdout == "Once upon\n"
    assert str(result.exception) == "DEADLINE_EXCEEDED: too late"


def test_run_json(gateway: Gateway) -> None:
    answer = json.loads(_run("run", "--json", "-", text="Capital of France?"))
    assert answer["text"] == "Paris"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "preemptions": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }
    assert (answer["request_id"], answer["finish_reason"], answer["seed"]) == ("r-1", "stop", 9)


def test_a_refusal_is_a_problem(gateway: Gateway) -> None:
    with pytest.raises(Problem, match="NOT_FOUND: no model is called none"):
        _run("run", "--model", "none", "Hello")


def test_ps(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # of no account in a pipe
    title, first, second, *notes = _run("ps").splitlines()
    assert title.split() == ["worker", "state", "model", "slots", "waiting", "blocks", "cached", "busy", "tokens/s", "memory"]
    assert first.split() == ["worker-1", "ready", "tiny@fp32,", "vectors@fp32", "3/32", "0", "40/100", "0", "50%", "0", "0.0/0.0", "GiB"]
    assert second.split() == ["worker-2", "not", "ready", "tiny@fp32,", "vectors@fp32", "-/32", "-", "-/100", "-", "-", "-", "-"], (
        "old numbers are no news"
    )
    assert notes == ["worker-2: its stream ended 0 s ago", "queue tiny@fp32 batch: 4 waiting, the oldest for 2.0 s"]


def test_ps_json_tells_where_metrics_are_of_the_mesh_that_runs_here(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    fleet = json.loads(_run("ps", "--json"))
    assert fleet["workers"][0]["heartbeat"]["num_running"] == 3
    assert "internal_addresses" not in fleet
    home = Home.from_environment()
    home.make()
    addresses = {"gateway": "127.0.0.1:7"}
    with home.lock():
        home.write(Running(os.getpid(), client.find().address, "http://127.0.0.1:1/v1", "t", internal_addresses=addresses))
        assert json.loads(_run("ps", "--json"))["internal_addresses"] == addresses


def test_models(gateway: Gateway) -> None:
    title, row = _run("models").splitlines()
    assert title.split() == ["model", "aliases", "state", "does", "weights", "context", "vocabulary", "version"]
    assert row.split() == ["tiny", "chat", "ready", "generate", "fp32", "2048", "0", "00ff"]
    assert json.loads(_run("models", "--json"))["models"][0]["aliases"] == ["chat"]
