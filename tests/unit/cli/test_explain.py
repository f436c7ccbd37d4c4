"""`forebay explain`: bars whose seconds are the record's, what happened, who was looked at; refusals in one line."""

import json

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.problem import Problem
from tests.unit.cli.gateway import Gateway


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_record_is_shown_part_by_part(gateway: Gateway) -> None:
    shown = _run("explain", "r-1")
    rows = {line.split()[0]: line.split() for line in shown.splitlines()}
    assert rows["queue"][1:4] == ["w1", "2.000", "50%"]
    assert rows["decode"][1:4] == ["w1", "1.500", "38%"]
    for words in (
        "request r-1 of acme: tiny@fp32, standard",
        "stop after 4.000 s, first token after 2.500 s; 20 prompt tokens (16 cached), 5 output tokens, 1 preemptions",
        "3 before it in the queue",
        "it waited, as no worker had room",
        "0.100 s  admitted, 16 tokens cached",
        "0.200 s  prefill, 4 tokens in 2 chunks",
        "0.300 s  preempted by class",
    ):
        assert words in shown
    assert rows["w1"] == ["w1", "0", "0.5", "chosen"]
    assert rows["w2"] == ["w2", "-", "-", "no", "room"]
    assert [request.request_id for request in gateway.acts] == ["r-1"]


def test_bars_follow_one_another(gateway: Gateway) -> None:
    bars = [line for line in _run("explain", "r-1").splitlines() if "█" in line]
    ends = [line.rindex("█") for line in bars]
    assert ends == sorted(ends)
    assert sum(line.count("█") for line in bars) == 40


def test_json(gateway: Gateway) -> None:
    record = json.loads(_run("explain", "--json", "r-1"))
    assert record["total_seconds"] == record["admit_seconds"] + sum(part["seconds"] for part in record["attempts"][0]["parts"])


def test_an_unknown_id_is_one_line(gateway: Gateway) -> None:
    with pytest.raises(Problem, match="NOT_FOUND: there is no record of request"):
        _run("explain", "unknown")
