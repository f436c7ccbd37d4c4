"""TLS by files that are read again when they change; the last good ones count.

Inside the mesh it is mutual, and peers are known by role, not by address. Which roles there are and what each may do, others say.
"""

import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import grpc

from services.common import log
from services.common.pem import Material, PemFile, PemFiles, load
from services.common.settings import ServiceSettings, SettingsError

_log = log.get(__name__)

LOOK_SECONDS = 1.0
WARN_SECONDS = 7 * 86400.0
"""A certificate that ends sooner is told of, once."""


def role_name(role: str) -> str:
    """The DNS name in the certificates of a role, on whatever address it is reached."""
    return f"{role}.forebay.internal"


class Identity:
    """What this process shows its peers, and whose certificates it takes. Thread-safe: gRPC asks from threads of its own."""

    def __init__(
        self, files: PemFiles, name: str = "", *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        """`name` must be one of the certificate's; empty: any will do. SettingsError for files that can't be used now."""
        self._files = files
        self._name = name
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._next_look = clock() + LOOK_SECONDS
        self._stamps = files.stamps()  # taken before the files are read: what changes meanwhile is read again
        self._material = load(files, name)
        self._problem = ""
        self._told = 0.0  # of the end that came near, or of the end
        self.version = 1
        """Grows when the files have changed for others that can be used."""

    def look(self) -> None:
        """Reads the files again if they have changed, looking at most once a second. What can't be used is logged and changes nothing."""
        with self._lock:
            if self._clock() < self._next_look:
                return
            self._next_look = self._clock() + LOOK_SECONDS
            stamps = self._files.stamps()
            if stamps != self._stamps:
                self._stamps = stamps
                self._read()
            self._tell_of_its_end(self._material.ends_at)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel: it goes by the files as they are now, and so must be made anew after the version has grown."""
        self.look()
        material = self._material
        return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server's port: each handshake goes by the files as they are then."""
        served = self._material

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            self.look()
            if self._material is served:
                return None
            served = self._material
            return _configuration(served)

        mutual = self._files.ca is not None
        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            renewed,  # type: ignore[arg-type]  # the stubs forget None: as before
            require_client_authentication=mutual,
        )

    def server_context(self) -> ssl.SSLContext:
        """For one HTTP server: each handshake goes by the files as they are then."""

        def renew(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            self.look()
            connection.context = self._material.server

        context = self._material.server
        context.sni_callback = renew  # called with and without a name
        return context

    def _read(self) -> None:
        try:
            self._material = load(self._files, self._name)
        except SettingsError as error:
            if str(error) != self._problem:
                _log.error("certificate_refused", problem=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        self.version += 1
        _log.info("certificate_read", file=str(self._files.certificate.path), until=_day(self._material.ends_at))

    def _tell_of_its_end(self, ends_at: float) -> None:
        for moment, event in ((ends_at, "certificate_has_expired"), (ends_at - WARN_SECONDS, "certificate_expires_soon")):
            if self._told < moment <= self._now():
                _log.error(event, file=str(self._files.certificate.path), until=_day(ends_at))
                self._told = moment
                return


def mutual(settings: ServiceSettings, role: str) -> Identity | None:
    """Who this service is to its peers; None where no file is set. SettingsError for fewer than all three, and for what can't be used."""
    files = given(settings, "tls_cert_file", "tls_key_file", "tls_ca_file")
    return Identity(PemFiles(*files), role_name(role)) if files else None


def given(settings: ServiceSettings, *names: str) -> list[PemFile]:
    """The files that these settings name: all or none. SettingsError where one is missing."""
    paths = {f"FOREBAY_{name.upper()}": getattr(settings, name) for name in names}
    missing = [variable for variable, path in paths.items() if path is None]
    if not missing or len(missing) == len(paths):
        return [PemFile(variable, path) for variable, path in paths.items() if path is not None]
    raise SettingsError(f"{' and '.join(missing)} must be set, too: {', '.join(paths)} belong together")


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], root_certificates=material.ca)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
