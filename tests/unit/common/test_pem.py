"""Certificates are tried before they are used; what is wrong is one line with variable and file."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key

from services.cli import authority
from services.common.pem import PemFile, PemFiles, load
from services.common.settings import SettingsError
from services.common.tls import role_name

WORKER = role_name("worker")


def files_of(folder: Path, role: str = "worker", *, ca: bool = True) -> PemFiles:
    """As `forebay certs` writes them."""
    return PemFiles(
        PemFile("CERT", authority.certificate(folder, role)),
        PemFile("KEY", authority.key(folder, role)),
        PemFile("CA", authority.certificate(folder, "ca")) if ca else None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.make(tmp_path / "certs", 1)
    return tmp_path / "certs"


def test_good_files_give_their_bytes_and_their_end(folder: Path) -> None:
    files = files_of(folder)
    material = load(files, WORKER)
    assert (material.certificate, material.key) == (files.certificate.path.read_bytes(), files.key.path.read_bytes())
    assert material.ca == authority.certificate(folder, "ca").read_bytes()
    read = ssl._ssl._test_decode_cert(str(files.certificate.path))  # type: ignore[attr-defined]
    assert material.ends_at == ssl.cert_time_to_seconds(read["notAfter"])


def test_without_a_ca_no_name_is_asked_for_nor_who_signed_it(folder: Path) -> None:
    material = load(files_of(folder, ca=False), "")
    assert material.ca is None
    assert material.server.verify_mode is ssl.CERT_NONE


def _encrypt(folder: Path) -> None:
    key = load_pem_private_key(authority.key(folder, "worker").read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    authority.key(folder, "worker").write_bytes(encrypted)


def _other_ca(folder: Path) -> None:
    authority.make(folder / "other")
    authority.certificate(folder / "other", "ca").replace(authority.certificate(folder, "ca"))


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no certificate": (lambda folder: authority.certificate(folder, "worker").unlink(), "CERT={}/worker.pem: No such file or directory"),
    "no key": (lambda folder: authority.key(folder, "worker").unlink(), "KEY={}/worker.key: No such file or directory"),
    "no ca": (lambda folder: authority.certificate(folder, "ca").unlink(), "CA={}/ca.pem: No such file or directory"),
    "garbage": (lambda folder: authority.certificate(folder, "worker").write_text("x"), "CERT={}/worker.pem holds no PEM certificate"),
    "garbage key": (lambda folder: authority.key(folder, "worker").write_text("x"), "KEY={}/worker.key is no PEM private key"),
    "garbage ca": (lambda folder: authority.certificate(folder, "ca").write_text(""), "CA={}/ca.pem holds no PEM certificate"),
    "another's key": (
        lambda folder: authority.key(folder, "gateway").replace(authority.key(folder, "worker")),
        "KEY={0}/worker.key is not the key of CERT={0}/worker.pem",
    ),
    "an encrypted key": (_encrypt, "KEY={}/worker.key is encrypted: give one without a password, readable by this service alone"),
    "expired": (
        lambda folder: authority.make(folder, -0.02, renew=True),  # type: ignore[arg-type]  # half an hour ago
        "CERT={0}/worker.pem fails verification by CA={0}/ca.pem: certificate has expired",
    ),
    "another ca": (_other_ca, "CERT={0}/worker.pem fails verification by CA={0}/ca.pem: unable to get local issuer certificate"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cant_be_used_is_named(folder: Path, case: str) -> None:
    spoil, words = CASES[case]
    spoil(folder)
    with pytest.raises(SettingsError) as caught:
        load(files_of(folder), WORKER)
    assert str(caught.value) == words.format(folder)


def test_another_roles_certificate_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"gateway\.pem fails verification by .*: Hostname mismatch.*worker\.forebay\.internal"):
        load(files_of(folder, "gateway"), WORKER)


def test_an_expired_public_certificate_is_refused_too(folder: Path) -> None:
    authority.make(folder, -0.02, renew=True)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"^CERT=.*worker\.pem fails verification: certificate has expired$"):
        load(files_of(folder, ca=False), "")
