"""The CA of one mesh and a certificate per role, as files in a folder. What they are for is in services/common/tls.py."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.cli import private_file
from services.cli.problem import Problem
from services.common.tls import role_name

ROLES = ("gateway", "scheduler", "worker")
_CA = "ca"
_CA_DAYS = 3650
_RENEW_DAYS = 30
_SKEW = timedelta(hours=1)  # of clocks
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign",
    "encipher_only", "decipher_only",
)  # fmt: skip


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, days: int = 365, *, renew: bool = False, force: bool = False) -> None:
    """Writes NAME.pem and NAME.key for the CA and each role. Problem where that would replace something.

    `renew` replaces the roles' alone, `force` all.
    """
    found = [path.name for name in (_CA, *ROLES) for path in (certificate(folder, name), key(folder, name)) if path.exists()]
    if found and not (renew or force):
        raise Problem(f"{folder} has {', '.join(found)} already: --renew makes new certificates by its CA, --force a new CA, too")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _read_authority(folder) if renew and not force else _new_authority(folder)
    for role in ROLES:
        _issue(folder, role, authority, days)


def ensure(folder: Path) -> None:
    """The files of `make`, made where there are none and renewed a month before their end."""
    certificates = [certificate(folder, role) for role in ROLES]
    if not all(path.exists() for path in certificates):
        make(folder, force=True)
    elif min(read(path).not_valid_after_utc for path in certificates) < datetime.now(UTC) + timedelta(days=_RENEW_DAYS):
        make(folder, renew=True)


def certificate(folder: Path, name: str) -> Path:
    """Of a role or the CA."""
    return folder / f"{name}.pem"


def key(folder: Path, name: str) -> Path:
    """Of a role or the CA."""
    return folder / f"{name}.key"


def environment(folder: Path, role: str) -> dict[str, str]:
    """What a service of that role must have set."""
    files = {"CERT": certificate(folder, role), "KEY": key(folder, role), "CA": certificate(folder, _CA)}
    return {f"FOREBAY_TLS_{name}_FILE": str(path.resolve()) for name, path in files.items()}


def _new_authority(folder: Path) -> _Authority:
    private = ec.generate_private_key(ec.SECP256R1())
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    name = _name("Forebay mesh CA")
    builder = _builder(name, name, private.public_key(), datetime.now(UTC) + timedelta(days=_CA_DAYS)).add_extension(usage, critical=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    authority = _Authority(builder.sign(private, SHA256()), private)
    _write(folder, _CA, authority)
    return authority


def _read_authority(folder: Path) -> _Authority:
    path = key(folder, _CA)
    try:
        private = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise Problem(f"{path} isn't there: bring the CA's key here, or make a new CA with --force") from error
    except (ValueError, TypeError) as error:
        raise Problem(f"{path} is no private key that can be read: --force makes a new CA") from error
    signed = read(certificate(folder, _CA))
    if not isinstance(private, ec.EllipticCurvePrivateKey) or signed.public_key() != private.public_key():
        raise Problem(f"{path} is not the key of {certificate(folder, _CA)}: --force makes a new CA")
    return _Authority(signed, private)


def read(path: Path) -> x509.Certificate:
    """Problem where the file holds no certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError as error:
        raise Problem(f"{path} isn't there: --force makes a new CA") from error
    except ValueError as error:
        raise Problem(f"{path} holds no certificate: --force makes a new CA") from error


def _issue(folder: Path, role: str, authority: _Authority, days: int) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    end = min(datetime.now(UTC) + timedelta(days=days), authority.certificate.not_valid_after_utc)
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_name(f"Forebay {role}"), authority.certificate.subject, private.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(signer, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(role_name(role))]), critical=False)
    )
    _write(folder, role, _Authority(builder.sign(authority.key, SHA256()), private))


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, end: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), datetime.now(UTC) - _SKEW, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(**granted: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: granted.get(use, False) for use in _USES})


def _write(folder: Path, name: str, made: _Authority) -> None:
    private_file.write(key(folder, name), made.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private_file.write(certificate(folder, name), made.certificate.public_bytes(Encoding.PEM), mode=0o644)
