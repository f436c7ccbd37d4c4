"""`forebay models load, unload, pin, unpin`: what they ask for, and what is said of each worker."""

import json

import pytest
from typer.testing import CliRunner

from forebay.v1 import scheduler_pb2
from services.cli.app import app
from services.cli.problem import Problem
from tests.unit.cli.gateway import Gateway

KINDS = {
    "load": scheduler_pb2.MODEL_ACT_KIND_LOAD,
    "unload": scheduler_pb2.MODEL_ACT_KIND_UNLOAD,
    "pin": scheduler_pb2.MODEL_ACT_KIND_PIN,
    "unpin": scheduler_pb2.MODEL_ACT_KIND_UNPIN,
}


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("word", KINDS)
def test_an_act_says_what_the_worker_says(gateway: Gateway, word: str) -> None:
    assert _run(word, "tiny@fp32", "--worker", "worker-1") == "worker-1: tiny@fp32 is coming to the device\n"
    [asked] = gateway.acts
    assert (asked.model, asked.act, asked.worker) == ("tiny@fp32", KINDS[word], "worker-1")


def test_as_json(gateway: Gateway) -> None:
    answer = json.loads(_run("pin", "tiny", "--worker", "worker-1", "--json"))
    assert answer == {"outcomes": [{"worker_id": "worker-1", "refused": False, "words": "is coming to the device"}]}


def test_a_worker_that_refuses_is_an_error_though_others_did_it(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Problem, match="worker-2 refused"):
        app(["models", "unload", "tiny"], standalone_mode=False)
    assert "worker-2: tiny is in use by a request" in capsys.readouterr().out


def test_alone_it_lists(gateway: Gateway) -> None:
    assert "tiny" in _run()
    assert json.loads(_run("--json"))["models"][0]["name"] == "tiny"
