"""An identity follows its files; what can't be used changes nothing and is told once."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.cli import authority
from services.common import tls
from services.common.settings import ServiceSettings, SettingsError
from services.common.tls import WARN_SECONDS, Identity, role_name
from tests.unit.common.test_pem import files_of

DAY = 86_400.0


class Clock:
    """Seconds that a test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.make(tmp_path / "certs")
    return tmp_path / "certs"


def settings(folder: Path, role: str) -> ServiceSettings:
    """As `forebay certs` tells to set them."""
    variables = authority.environment(folder, role)
    return ServiceSettings(**{variable.removeprefix("FOREBAY_").lower(): Path(path) for variable, path in variables.items()})


def test_a_change_counts_a_second_later(folder: Path) -> None:
    clock = Clock()
    identity = Identity(files_of(folder), role_name("worker"), clock=clock)
    authority.make(folder, renew=True)
    identity.look()
    assert identity.version == 1
    for clock.now in (1.0, 2.0):
        identity.look()
        assert identity.version == 2


def test_a_bad_change_is_told_once_and_the_last_good_one_counts(folder: Path) -> None:
    clock = Clock()
    identity = Identity(files_of(folder), role_name("worker"), clock=clock)
    good = authority.key(folder, "worker").read_bytes()
    with capture_logs() as logs:
        for number in (1, 2, 3):
            authority.key(folder, "worker").write_text("x" * number)
            clock.now += 1
            identity.look()
    assert [log["event"] for log in logs] == ["certificate_refused"]
    assert "worker.key is no PEM private key" in logs[0]["problem"]
    assert identity.version == 1
    authority.key(folder, "worker").write_bytes(good)
    clock.now += 1
    identity.look()
    assert identity.version == 2


def test_files_that_are_gone_for_a_while_do_no_harm(folder: Path) -> None:
    clock = Clock()
    identity = Identity(files_of(folder), role_name("worker"), clock=clock)
    away = folder.rename(folder.with_name("away"))
    clock.now = 1.0
    with capture_logs() as logs:
        identity.look()
    assert [log["event"] for log in logs] == ["certificate_refused"]
    away.rename(folder)
    clock.now = 2.0
    identity.look()
    assert identity.version == 2


def test_the_end_is_told_of_a_week_before_and_when_it_is_there(folder: Path) -> None:
    clock = Clock()
    end = identity_end(folder)
    now = Clock(end - 30 * DAY)
    identity = Identity(files_of(folder), role_name("worker"), clock=clock, now=now)
    told: list[list[str]] = []
    for now.now in (end - 30 * DAY, end - WARN_SECONDS, end - DAY, end, end + DAY):
        clock.now += 1
        with capture_logs() as logs:
            identity.look()
        told.append([log["event"] for log in logs])
    assert told == [[], ["certificate_expires_soon"], [], ["certificate_has_expired"], []]


def identity_end(folder: Path) -> float:
    """When the worker's certificate ends."""
    return authority.read(authority.certificate(folder, "worker")).not_valid_after_utc.timestamp()


def test_no_file_is_no_identity() -> None:
    assert tls.mutual(ServiceSettings(), "worker") is None


@pytest.mark.parametrize("missing", ["tls_cert_file", "tls_key_file", "tls_ca_file"])
def test_all_three_or_none(folder: Path, missing: str) -> None:
    with pytest.raises(SettingsError, match=rf"^FOREBAY_{missing.upper()} must be set, too: "):
        tls.mutual(settings(folder, "worker").model_copy(update={missing: None}), "worker")


def test_an_empty_variable_is_one_that_isnt_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TLS_CERT_FILE", "")
    assert ServiceSettings().tls_cert_file is None


def test_a_service_is_what_its_certificate_says(folder: Path) -> None:
    assert tls.mutual(settings(folder, "worker"), "worker") is not None
    with pytest.raises(SettingsError, match=r"^FOREBAY_TLS_CERT_FILE=.*worker\.pem fails verification by FOREBAY_TLS_CA_FILE="):
        tls.mutual(settings(folder, "worker"), "scheduler")
