"""The files of `forebay certs`: whose they are, what is replaced, and that each role's are taken by its peers."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.cli import authority
from services.cli.problem import Problem
from services.common.pem import load
from services.common.tls import role_name
from tests.unit.common.test_pem import files_of


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("role", authority.ROLES)
def test_each_roles_files_are_good_for_that_role(tmp_path: Path, role: str) -> None:
    authority.make(tmp_path, 90)
    end = datetime.fromtimestamp(load(files_of(tmp_path, role), role_name(role)).ends_at, UTC)
    assert timedelta(days=89) < end - datetime.now(UTC) <= timedelta(days=90)


def test_keys_are_private(tmp_path: Path) -> None:
    authority.make(tmp_path / "certs")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "certs").iterdir()}
    names = ("ca", *authority.ROLES)
    assert modes == {f"{name}.key": 0o600 for name in names} | {f"{name}.pem": 0o644 for name in names}
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    authority.make(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(Problem, match=r"has ca\.pem, ca\.key, .* already: --renew .* --force"):
        authority.make(tmp_path)
    assert contents(tmp_path) == before


def test_renew_keeps_the_ca_and_force_doesnt(tmp_path: Path) -> None:
    authority.make(tmp_path)
    first = contents(tmp_path)
    authority.make(tmp_path, renew=True)
    second = contents(tmp_path)
    assert {name for name in first if first[name] == second[name]} == {"ca.pem", "ca.key"}
    authority.make(tmp_path, force=True)
    assert not {name for name, content in contents(tmp_path).items() if content == second[name]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("ca.key", None, r"ca\.key isn't there: bring the CA's key here, or make a new CA with --force"),
        ("ca.key", "x", r"ca\.key is no private key that can be read: --force makes a new CA"),
        ("ca.pem", None, r"ca\.pem isn't there: --force makes a new CA"),
        ("ca.pem", "x", r"ca\.pem holds no certificate: --force makes a new CA"),
    ],
)
def test_a_ca_that_cant_sign_is_named(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    authority.make(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(Problem, match=words):
        authority.make(tmp_path, renew=True)


def test_the_key_of_another_ca_is_named(tmp_path: Path) -> None:
    authority.make(tmp_path)
    authority.make(tmp_path / "other")
    (tmp_path / "other" / "ca.key").replace(tmp_path / "ca.key")
    with pytest.raises(Problem, match=r"ca\.key is not the key of .*ca\.pem"):
        authority.make(tmp_path, renew=True)


def test_a_start_makes_them_once_and_renews_them_in_time(tmp_path: Path) -> None:
    authority.ensure(tmp_path)
    first = contents(tmp_path)
    authority.ensure(tmp_path)
    assert contents(tmp_path) == first
    authority.make(tmp_path, 29, renew=True)
    short = contents(tmp_path)
    authority.ensure(tmp_path)
    assert contents(tmp_path)["worker.pem"] != short["worker.pem"]
    assert contents(tmp_path)["ca.pem"] == first["ca.pem"]
