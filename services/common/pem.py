"""PEM files of one certificate, its key and its CA: read and tried before anybody goes by them. Errors name variable and file."""

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.common.settings import SettingsError

Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class PemFile:
    """A file and the variable that named it."""

    variable: str
    path: Path

    def __str__(self) -> str:
        return f"{self.variable}={self.path}"

    def read(self) -> bytes:
        """Its bytes; SettingsError where they can't be read."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise SettingsError(f"{self}: {error.strerror}") from error

    def stamp(self) -> Stamp:
        """Differs once the file does; zeros where there is none."""
        try:
            status = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True)
class PemFiles:
    """Certificate (with its chain) and key; with a CA, both ends show certificates, and only those that it signed are taken."""

    certificate: PemFile
    key: PemFile
    ca: PemFile | None = None

    def stamps(self) -> list[Stamp]:
        """Differ once a file does."""
        return [file.stamp() for file in (self.certificate, self.key, self.ca) if file is not None]


@dataclass(frozen=True)
class Material:
    """What good files hold. `ends_at`: Unix seconds. `server`: for servers of Python's own."""

    certificate: bytes
    key: bytes
    ca: bytes | None
    ends_at: float
    server: ssl.SSLContext = field(repr=False)


def load(files: PemFiles, name: str) -> Material:
    """The files' contents, if a peer would take the certificate for `name` (empty: for any). SettingsError says what it wouldn't."""
    certificate, key, ca = files.certificate.read(), files.key.read(), files.ca.read() if files.ca else None
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files.certificate)  # before its key, so that the right file is blamed
    client, server = _context(ssl.PROTOCOL_TLS_CLIENT, files), _context(ssl.PROTOCOL_TLS_SERVER, files)
    client.check_hostname = bool(name)
    server.verify_mode = ssl.CERT_REQUIRED if files.ca else ssl.CERT_NONE
    try:
        ends_at = _handshake(client, server, name)
    except ssl.SSLCertVerificationError as error:
        signer = f" by {files.ca}" if files.ca else ""
        raise SettingsError(f"{files.certificate} fails verification{signer}: {error.verify_message.rstrip('.')}") from error
    except ssl.SSLError as error:
        raise SettingsError(f"{files.certificate} can't be used: {error.reason or error}") from error
    return Material(certificate, key, ca, ends_at, server)


def _context(protocol: int, files: PemFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    if files.ca is None:  # who has signed it is for clients to judge
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    _trust(context, files.ca or files.certificate)
    try:
        context.load_cert_chain(files.certificate.path, files.key.path, password=lambda: _refuse_password(files.key))
    except ssl.SSLError as error:
        what = f"not the key of {files.certificate}" if error.reason == "KEY_VALUES_MISMATCH" else "no PEM private key"
        raise SettingsError(f"{files.key} is {what}") from error
    except OSError as error:  # gone since it was read
        raise SettingsError(f"{files.key}: {error.strerror}") from error
    return context


def _trust(context: ssl.SSLContext, file: PemFile) -> None:
    try:
        context.load_verify_locations(cafile=file.path)
    except ssl.SSLError as error:
        raise SettingsError(f"{file} holds no PEM certificate") from error
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error


def _refuse_password(key: PemFile) -> str:
    raise SettingsError(f"{key} is encrypted: give one without a password, readable by this service alone")


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> float:
    """Both ends of a handshake, in memory: they judge by the same rules as any peer. Returns when the certificate ends."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name or None)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (near, far, near, far):  # hello; hello, certificate, finished; certificate, finished; done
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = near.getpeercert()
    assert certificate is not None
    ends_at = certificate["notAfter"]
    assert isinstance(ends_at, str)
    return float(ssl.cert_time_to_seconds(ends_at))
