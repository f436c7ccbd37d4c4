"""Who calls: verifies the bearer token of a request. Knows keys and claims, no request."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Caller:
    """Whom a verified token names."""

    org: str
    subject: str
    roles: frozenset[str]
    expires_at: float  # seconds since the epoch

    def require(self, role: str) -> None:
        """Raises PERMISSION_DENIED where the token lacks a role: "user" or "operator"."""
        raise NotImplementedError


class Authenticator:
    """Verifies tokens against the keys of a JWKS."""

    @classmethod
    def from_file(cls, path: Path, *, issuer: str = "", audience: str = "") -> Self:
        """Keys from a file, read again when it changes."""
        raise NotImplementedError

    @classmethod
    def from_url(cls, url: str, *, issuer: str = "", audience: str = "") -> Self:
        """Keys from an https URL, at most one fetch in 10 s."""
        raise NotImplementedError

    async def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind an `authorization` header. Raises UNAUTHENTICATED with a plain reason, never with the token."""
        raise NotImplementedError
