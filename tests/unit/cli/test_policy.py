"""`forebay policy check`, and `forebay up --policy`: a file is judged before anything starts."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.problem import Problem

GOOD = "tiers: {free: {requests_per_minute: 5}}\norgs: {acme: {tier: free}}\nmodels: {chat: {targets: tiny}}\n"
BAD = "tiers:\n  free:\n    requests_per_minute: lots\n"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_file_that_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(GOOD)
    assert run("policy", "check", str(file)) == f"{file} can be used: 1 tiers, 1 orgs, 1 models\n"
    assert json.loads(run("policy", "check", str(file), "--json")) == {"usable": True, "problems": []}


@pytest.mark.parametrize("command", [("policy", "check"), ("up", "--policy")])
def test_what_is_wrong_is_one_line_with_the_file_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    home, file = tmp_path / "home", tmp_path / "policy.yaml"
    monkeypatch.setenv("FOREBAY_HOME", str(home))
    file.write_text(BAD)
    with pytest.raises(Problem) as caught:
        run(*command, str(file))
    assert str(caught.value).startswith(f"{file}:3: tiers.free.requests_per_minute is lots; it must be a whole number from 0 to")
    assert not home.exists()
    with pytest.raises(OSError, match="No such file"):
        run(*command, str(tmp_path / "none.yaml"))


def test_every_problem_is_a_line(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(BAD + "orgs:\n  acme:\n    weight: -1\n    colour: red\n")
    with pytest.raises(Problem) as caught:
        run("policy", "check", str(file))
    lines = [*caught.value.details, str(caught.value)]
    assert [line.removeprefix(f"{file}:").partition(":")[0] for line in lines] == ["3", "6", "7"]


def test_programs_get_the_line_as_a_number(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(BAD)
    result = CliRunner().invoke(app, ["policy", "check", str(file), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    (problem,) = found["problems"]
    assert (found["usable"], problem["line"]) == (False, 3)
    assert problem["problem"].startswith("tiers.free.requests_per_minute is lots")
