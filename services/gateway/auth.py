"""Who calls: verifies the bearer token of a request, and gives its org, subject and roles. Knows keys and claims, no request.

A JWT's key is found by its `kid` alone, and used with its own algorithm alone: nothing else in its header is obeyed.
A token that expires while its request runs ends nothing: the answer goes on to its end or deadline, new calls are refused.
"""

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from jwt.exceptions import (
    InvalidAudienceError,
    InvalidIssuerError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from services.common.errors import Code, StatusError
from services.gateway.keys import KeySource
from services.policy import api_key
from services.policy import org as org_policy

ROLES = frozenset({"user", "operator"})
MAX_TOKEN_BYTES = 16 << 10
LEEWAY_SECONDS = 30
_MAX_SUBJECT_CHARS = 256
_COMPACT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Caller:
    """Whom a verified token names. Everything later is scoped to `org`."""

    org: str
    subject: str  # may be empty
    roles: frozenset[str]
    expires_at: float  # seconds since the epoch
    key_id: str = ""  # of an API key

    @property
    def actor(self) -> str:
        """How audits name it: org/subject, or the API key's public id."""
        return self.key_id or f"{self.org}/{self.subject}"

    def require(self, role: str) -> None:
        """Raises PERMISSION_DENIED where the token lacks a role: "user" or "operator"."""
        if role not in self.roles:
            raise StatusError(Code.PERMISSION_DENIED, f"this needs a token with the role {role}: ask your operator for one")


ApiKeyOwner = Callable[[str], Awaitable[Caller]]
"""The caller behind an API key; UNAUTHENTICATED where there is none."""


class Authenticator:
    """Verifies tokens against a set of public keys, and has API keys looked up."""

    def __init__(
        self,
        keys: KeySource,
        *,
        issuer: str = "",
        audience: str = "",
        api_key_owner: ApiKeyOwner | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`issuer` and `audience` must match exactly where they are set. `clock` gives seconds since the epoch."""
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._api_key_owner = api_key_owner
        self._clock = clock

    async def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind an `authorization` header. Raises UNAUTHENTICATED with a plain reason, never with the token."""
        token = _bearer(authorization)
        if self._api_key_owner is not None and token.startswith(api_key.PREFIX):
            return await self._api_key_owner(token)
        if not _COMPACT.fullmatch(token):
            raise refused("it is not a signed JWT of three parts")
        header = _header(token)
        key = await self._keys.find(header["kid"])
        if key is None:
            raise refused("its key id (kid) is not among the trusted keys")
        if header.get("alg") != key.algorithm_name:
            raise refused("its algorithm (alg) is not the one of its key")
        return self._caller(self._claims(token, key))

    def _claims(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        """The verified claims, times apart."""
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self._issuer or None,
                audience=self._audience or None,
                # Times are checked below, on this object's clock and without rounding.
                options={
                    "require": ["exp"], "verify_aud": bool(self._audience), "verify_iss": bool(self._issuer), "verify_sub": False,
                    "verify_exp": False, "verify_nbf": False, "verify_iat": False,
                },
            )  # fmt: skip
        except PyJWTError as error:
            raise refused(_reason(error)) from None
        except (ValueError, TypeError, OverflowError, RecursionError):  # claims of odd types
            raise refused("its claims can't be read") from None
        self._check_times(claims)
        return claims

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        now = self._clock()
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name)
            if value is None and name != "exp":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
                raise refused(f"its {name} is not a time in seconds")
        if claims["exp"] <= now - LEEWAY_SECONDS:
            raise refused("it has expired: get a new one")
        if claims.get("nbf", 0) > now + LEEWAY_SECONDS:
            raise refused("it is not valid yet (nbf)")
        if claims.get("iat", 0) > now + LEEWAY_SECONDS:
            raise refused("it was issued in the future (iat): check the clocks")

    @staticmethod
    def _caller(claims: Mapping[str, Any]) -> Caller:
        org, subject, roles = claims.get("owner"), claims.get("sub", ""), claims.get("roles", ["user"])
        if not isinstance(org, str) or not org_policy.NAME.fullmatch(org):
            raise refused("its owner claim is not an org: 1 to 128 letters, digits, '.', '_' and '-'")
        if not isinstance(subject, str) or len(subject) > _MAX_SUBJECT_CHARS or not subject.isprintable():
            raise refused(f"its sub claim is not a text of at most {_MAX_SUBJECT_CHARS} printable characters")
        if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
            raise refused("its roles claim is not a list of names")
        return Caller(org, subject, ROLES.intersection(roles), float(claims["exp"]))


def _bearer(authorization: str | None) -> str:
    """The token of a header, of sane size and shape."""
    if not authorization:
        raise StatusError(Code.UNAUTHENTICATED, "no token was sent: add the header authorization: Bearer TOKEN", reason="NO_TOKEN")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise StatusError(Code.UNAUTHENTICATED, "the authorization header must be: Bearer TOKEN", reason="NO_TOKEN")
    if len(token) > MAX_TOKEN_BYTES:
        raise refused(f"it is longer than {MAX_TOKEN_BYTES} bytes")
    return token.strip(" ")


def _header(token: str) -> dict[str, Any]:
    """The token's header, with a key id and nothing that asks for more than a signature check."""
    try:
        header = jwt.get_unverified_header(token)
    except (PyJWTError, ValueError, RecursionError):
        raise refused("its header can't be read") from None
    if not isinstance(header.get("kid"), str):
        raise refused("its header names no key (kid)")
    for name in ("crit", "b64"):
        if name in header:
            raise refused(f"its header asks for an extension ({name}) that isn't known here")
    return header


def _reason(error: PyJWTError) -> str:
    """Words for what PyJWT found, without what is in the token."""
    reasons: dict[type[PyJWTError], str] = {
        InvalidSignatureError: "its signature is wrong",
        InvalidAudienceError: "it is for another audience (aud)",
        InvalidIssuerError: "it is from another issuer (iss)",
    }
    if isinstance(error, MissingRequiredClaimError):
        return f"its {error.claim} claim is missing"
    return reasons.get(type(error), "it is not a valid JWT")


def refused(why: str) -> StatusError:
    """UNAUTHENTICATED, for a token that was sent."""
    return StatusError(Code.UNAUTHENTICATED, f"the token is refused: {why}", reason="INVALID_TOKEN")
