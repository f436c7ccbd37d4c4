"""`forebay usage` and `forebay audit`: what is asked, what is shown."""

import json

import pytest
from typer.testing import CliRunner

from services.cli import usage
from services.cli.app import app
from services.cli.problem import Problem, Usage
from tests.unit.cli.gateway import Gateway


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_usage(gateway: Gateway) -> None:
    title, row = run("usage", "--days", "7", "--org", "acme").splitlines()
    assert title.split() == ["day", "org", "model", "class", "requests", "failed", "prompt", "cached", "output"]
    assert row.split() == ["2026-12-02", "acme", "tiny@fp32", "batch", "1,200", "3", "45,678", "16", "9"]
    assert run("usage", "--org", "none") == "no use\n"
    assert json.loads(run("usage", "--json"))["rows"][0]["num_requests"] == "1200"
    assert [(request.org, request.days) for request in gateway.acts] == [("acme", 7), ("none", 1), ("", 1)]


def test_all_pages_of_use_are_shown_up_to_a_bound(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(json.loads(run("usage", "--org", "paged", "--json"))["rows"]) == 3
    assert [request.page_token for request in gateway.acts] == ["", "second", "third"]
    monkeypatch.setattr(usage, "_MAX_PAGES", 4)
    with pytest.raises(Problem, match=r"more than 4 rows: ask for fewer --days, or one --org"):
        run("usage", "--org", "endless")


def test_audit(gateway: Gateway) -> None:
    title, row = run("audit", "--limit", "5").splitlines()
    assert title.split() == ["at", "actor", "act", "target", "details", "outcome"]
    assert row.split() == ["2023-11-14", "22:13", "ops/olga", "SetOrg", "acme", "weight=2", "OK"]
    assert json.loads(run("audit", "--json"))["entries"][0]["act"] == "SetOrg"
    assert [request.limit for request in gateway.acts] == [5, 100]


@pytest.mark.parametrize(("command", "most"), [(("usage", "--days"), 90), (("audit", "--limit"), 1000)])
def test_bounds_are_named(gateway: Gateway, command: tuple[str, ...], most: int) -> None:
    for value in ("0", str(most + 1), "x"):
        with pytest.raises(Usage, match=rf"{command[1]} is {value}: it must be a whole number from 1 to {most}"):
            run(*command, value)
