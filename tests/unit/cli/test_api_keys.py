"""`forebay keys`: the development token as ever, and API keys: what is asked, what is shown."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.keys import ensure
from services.cli.problem import Problem, Usage
from tests.unit.cli.gateway import Gateway


def run(*arguments: str) -> tuple[str, str]:
    """Standard output and standard error."""
    result = CliRunner().invoke(app, ["keys", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_alone_it_prints_the_development_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    assert run() == (f"{ensure(tmp_path / 'keys').token}\n", "")


@pytest.mark.parametrize("folder", ["deploy/keys", "./keys"])
def test_a_folder_has_a_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(folder) == (f"{ensure(tmp_path / folder).token}\n", "")


def test_a_word_that_is_no_command_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["keys", "lst"])
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_new_key_is_the_one_thing_on_standard_output(gateway: Gateway) -> None:
    out, notes = run("create", "--org", "acme", "--name", "nightly", "--expires", "30d")
    assert out == "fb_secret\n"
    assert notes == "key k1 of acme, until 2027-01-15 08:00 UTC; it is not shown again\n"
    assert run("create", "--org", "acme", "--name", "ops", "--operator")[1].endswith("until it is revoked; it is not shown again\n")
    first, second = gateway.acts
    assert (first.org, first.name, list(first.roles), first.lifetime_seconds) == ("acme", "nightly", ["user"], 30 * 86400)
    assert (list(second.roles), second.lifetime_seconds) == (["user", "operator"], 0)
    made = json.loads(run("create", "--org", "acme", "--name", "x", "--json")[0])
    assert (made["key"], made["info"]["key_id"]) == ("fb_secret", "k1")


def test_what_is_refused_names_the_field(gateway: Gateway) -> None:
    with pytest.raises(Problem, match="INVALID_ARGUMENT: org is refused: it must be another"):
        run("create", "--org", "refused", "--name", "x")
    with pytest.raises(Usage, match="--expires is soon: it must be a time such as 90s, 45m, 12h or 30d"):
        run("create", "--org", "acme", "--name", "x", "--expires", "soon")
    assert CliRunner().invoke(app, ["keys", "create", "--name", "x"]).exit_code == 2


def test_list_and_revoke(gateway: Gateway) -> None:
    title, row = run("list")[0].splitlines()
    assert title.split() == ["id", "org", "name", "roles", "created", "expires"]
    assert row.split() == ["k1", "acme", "[ci]", "user,", "operator", "2023-11-14", "22:13", "-"]
    assert run("list", "--org", "none") == ("no API keys\n", "")
    assert json.loads(run("list", "--json")[0])["keys"][0]["name"] == "[ci]"
    assert run("revoke", "k1") == ("key k1 is revoked\n", "")
    assert json.loads(run("revoke", "k1", "--json")[0]) == {}
    assert [request.key_id for request in gateway.acts[3:]] == ["k1", "k1"]
