"""The development identity: what it claims, who may read it, when it is made anew."""

import json
import stat
import time
from pathlib import Path

import jwt
import pytest

from services.cli import keys
from services.cli.problem import Problem


def _verified(identity: keys.Identity) -> dict[str, object]:
    jwks = jwt.PyJWKSet.from_json(identity.jwks_path.read_text())
    key = jwks[jwt.get_unverified_header(identity.token)["kid"]]
    claims: dict[str, object] = jwt.decode(identity.token, key, algorithms=["EdDSA"], audience=keys.AUDIENCE, issuer=keys.ISSUER)
    return claims


def test_token_verifies_against_the_jwks_and_has_both_roles(tmp_path: Path) -> None:
    claims = _verified(keys.ensure(tmp_path / "keys"))
    assert claims["owner"] == "dev"
    assert claims["roles"] == ["user", "operator"]


def test_jwks_holds_no_private_part(tmp_path: Path) -> None:
    (key,) = json.loads(keys.ensure(tmp_path).jwks_path.read_text())["keys"]
    assert "d" not in key


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    keys.ensure(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    assert modes == {"ed25519.pem": 0o600, "token": 0o600, "jwks.json": 0o644}


def test_reused_while_valid(tmp_path: Path) -> None:
    first, second = keys.ensure(tmp_path), keys.ensure(tmp_path)
    assert (first.renewed, second.renewed) == (True, False)
    assert first.token == second.token


def test_made_anew_a_week_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    month = time.time() - 24 * 86400
    monkeypatch.setattr(keys.time, "time", lambda: month)
    old = keys.ensure(tmp_path)
    monkeypatch.undo()
    second = keys.ensure(tmp_path)
    assert second.renewed
    assert second.token != old.token
    assert _verified(second)["owner"] == "dev"


def test_a_token_of_another_key_is_replaced(tmp_path: Path) -> None:
    keys.ensure(tmp_path)
    (tmp_path / "ed25519.pem").unlink()
    second = keys.ensure(tmp_path)
    assert second.renewed
    assert _verified(second)["sub"] == "developer"


def test_a_broken_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ed25519.pem").write_text("not a key")
    with pytest.raises(Problem, match=r"ed25519.pem is not a private key: remove it"):
        keys.ensure(tmp_path)
