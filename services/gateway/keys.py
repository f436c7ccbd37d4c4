"""The public keys that tokens are verified with: a JWKS from a file or a URL, fresh enough and never fetched in a storm."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import h11
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.exceptions import PyJWTError

from services.common import log
from services.common.errors import unavailable

_log = log.get(__name__)

# Key type and curve -> the one algorithm that it is used with. No symmetric key is ever trusted.
_ALGORITHMS: Mapping[tuple[str, str], str] = {("OKP", "Ed25519"): "EdDSA", ("EC", "P-256"): "ES256", ("RSA", ""): "RS256"}
_MIN_RSA_BITS = 2048
_MAX_JWKS_BYTES = 1 << 20
_FILE_CHECK_SECONDS = 1.0
_REFRESH_SECONDS = 10.0  # at most one fetch in this time, whatever tokens come
_LIFETIME_SECONDS = 300.0  # a key that was removed is trusted no longer than this
_MAX_AGE_SECONDS = 3600.0  # while the URL can't be reached, its last answer is good for this long
_FETCH_SECONDS = 5.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

Keys = Mapping[str, jwt.PyJWK]


class KeysError(ValueError):
    """A JWKS can't be used: one line for a person."""


class KeySource(Protocol):
    """Finds keys by id."""

    async def find(self, key_id: str) -> jwt.PyJWK | None:
        """The key of this id, None where there is none. Raises UNAVAILABLE while no keys can be had at all."""
        ...


def parse(text: str | bytes) -> Keys:
    """The keys of a JWKS that can verify: of a known kind, with a `kid`, not for encryption. Raises KeysError where there is none."""
    try:
        entries = json.loads(text)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise KeysError('it is not a JWKS: a JSON object {"keys": [...]}') from None
    keys: dict[str, jwt.PyJWK] = {}
    for entry in entries if isinstance(entries, list) else ():
        key = _key(entry)
        if key is not None and key.key_id:
            keys.setdefault(key.key_id, key)
    if not keys:
        raise KeysError("it has no usable key: Ed25519, P-256, or RSA of 2048 bits and more, each with a kid")
    return keys


def _key(entry: Any) -> jwt.PyJWK | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str) or entry.get("use", "sig") != "sig":
        return None
    algorithm = _ALGORITHMS.get((str(entry.get("kty")), str(entry.get("crv", ""))))
    if algorithm is None or entry.get("alg", algorithm) != algorithm:
        return None
    try:
        key = jwt.PyJWK(entry, algorithm)
    except (PyJWTError, ValueError, TypeError):
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS:
        return None
    # A private key has no place in a JWKS, and verifying needs none.
    return None if "d" in entry else key


class FileKeys:
    """Keys from a file, read again when it has changed. A change that can't be read leaves the last good keys."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysError where the file can't be used now."""
        self._path = path
        self._clock = clock
        self._stamp: object = None
        self._next_look = 0.0
        self._keys: Keys = {}
        try:
            self._read()
        except (OSError, KeysError) as error:
            raise KeysError(f"{path}: {error}") from None

    async def find(self, key_id: str) -> jwt.PyJWK | None:
        """The key of this id now."""
        if self._clock() >= self._next_look:
            try:
                self._read()
            except (OSError, KeysError) as error:
                _log.warning("jwks_file_unusable", path=str(self._path), why=str(error))
        return self._keys.get(key_id)

    def _read(self) -> None:
        self._next_look = self._clock() + _FILE_CHECK_SECONDS
        status = self._path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if status.st_size > _MAX_JWKS_BYTES:
            raise KeysError(f"it has {status.st_size} bytes; at most {_MAX_JWKS_BYTES} are read")
        self._keys = parse(self._path.read_bytes())


def web_address(url: str, name: str) -> SplitResult:
    """A URL that may say whose tokens are trusted. KeysError, which calls it `name`, for any other."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises where it is no number
    except ValueError:
        parts = urlsplit("")
    # Over plain http whoever is on the way makes tokens; nobody is on the way to this host itself.
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)):
        raise KeysError(f"{name}={url[:80]}: it must be an https:// URL (http:// only to this host)")
    return parts


class UrlKeys:
    """Keys from a URL: fetched when they are old or one is missing, at most once in 10 s, by one task at a time."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic, *, name: str = "FOREBAY_JWKS_URL") -> None:
        """KeysError, which calls the URL `name`, for one that can't be trusted."""
        self._url = web_address(url, name)
        self._clock = clock
        self._keys: Keys = {}
        self._fetched_at = float("-inf")
        self._tried_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, key_id: str) -> jwt.PyJWK | None:
        """The key of this id. Raises UNAVAILABLE while no keys can be had at all."""
        begins = not self._known(key_id) and self._fetching is None and self._clock() - self._tried_at >= _REFRESH_SECONDS
        if begins:
            # A task of its own: the call that began it may be cancelled, and would leave nobody with keys.
            self._fetching = asyncio.create_task(self._fetch())
        # Who has an old key at hand doesn't wait for a fetch that another began.
        if self._fetching is not None and (begins or key_id not in self._keys):
            await asyncio.shield(self._fetching)
        if self._clock() - self._fetched_at > _MAX_AGE_SECONDS:
            raise unavailable("the keys that tokens are verified with can't be fetched: try again", _REFRESH_SECONDS, reason="NO_KEYS")
        return self._keys.get(key_id)

    async def _document(self) -> bytes:
        """The JWKS."""
        return await download(self._url)

    def _known(self, key_id: str) -> bool:
        return key_id in self._keys and self._clock() - self._fetched_at < _LIFETIME_SECONDS

    async def _fetch(self) -> None:
        self._tried_at = self._clock()
        try:
            async with asyncio.timeout(_FETCH_SECONDS):
                self._keys = parse(await self._document())
            self._fetched_at = self._clock()
        except (OSError, h11.RemoteProtocolError, KeysError) as error:  # TimeoutError is an OSError
            _log.warning("jwks_url_unusable", url=self._url.geturl(), why=str(error)[:200] or f"it took more than {_FETCH_SECONDS:g} s")
        finally:
            self._fetching = None


async def download(url: SplitResult) -> bytes:
    """What is at a URL: at most _MAX_JWKS_BYTES, and from no other address that it may name.

    Raises OSError, RemoteProtocolError or KeysError. Not in a thread: one that reads from a server that never ends could not be ended.
    """
    secure = url.scheme == "https"
    reader, writer = await asyncio.open_connection(url.hostname, url.port or (443 if secure else 80), ssl=secure or None)
    try:
        connection = h11.Connection(h11.CLIENT)
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers = [("host", url.netloc.rpartition("@")[2]), ("accept", "application/json"), ("connection", "close")]
        writer.write(connection.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
        body = bytearray()
        while len(body) <= _MAX_JWKS_BYTES:
            match connection.next_event():
                case h11.NEED_DATA:
                    connection.receive_data(await reader.read(1 << 16))
                case h11.Response(status_code=status) if status != 200:
                    raise KeysError(f"the answer is {status}, not 200")
                case h11.Data(data=data):
                    body += data
                case h11.EndOfMessage():
                    return bytes(body)
        raise KeysError(f"it has more than {_MAX_JWKS_BYTES} bytes")
    finally:
        writer.close()
