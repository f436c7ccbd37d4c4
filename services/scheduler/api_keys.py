"""Whose API keys are: kept by the hash of each, which alone finds it. Knows no secret after it has been made."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from services.common.errors import Code, StatusError, invalid
from services.policy import api_key
from services.scheduler import keys
from services.scheduler.audit import Act, Audit
from services.scheduler.store import Store

MAX_KEYS = 10_000
MAX_NAME_CHARS = 64
MAX_LIFETIME_SECONDS = 10 * 365 * 86_400.0
ROLES = ("user", "operator")


@dataclass(frozen=True)
class KeyInfo:
    """A key without its secret. Unix seconds; `expires_at` 0: never."""

    key_id: str
    org: str
    name: str
    roles: tuple[str, ...]
    created_at: float
    expires_at: float


class ApiKeys:
    """The keys of all orgs. Every scheduler asks Redis each time, so what is revoked here is worthless everywhere."""

    def __init__(self, store: Store, audit: Audit, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._audit = audit
        self._clock = clock

    async def authenticate(self, key_hash: bytes) -> KeyInfo:
        """Whose the key of this hash is. UNAUTHENTICATED: nobody's, or not any more. No secret is compared: its hash alone finds it."""
        (text,) = await self._store.commands(["HGET", keys.API_KEYS, key_hash.hex()])
        if text is None:
            raise StatusError(
                Code.UNAUTHENTICATED, "the API key is unknown or was revoked: ask your operator for one", reason="UNKNOWN_KEY"
            )
        info = _parse(text)
        if info.expires_at and info.expires_at <= self._clock():
            raise StatusError(Code.UNAUTHENTICATED, "the API key has expired: ask your operator for one", reason="EXPIRED_KEY")
        return info

    async def create(self, actor: str, org: str, name: str, roles: Sequence[str], lifetime_seconds: float) -> tuple[str, KeyInfo]:
        """A new key and what is listed of it. INVALID_ARGUMENT names a field that makes no sense."""
        _check(name, roles, lifetime_seconds)
        key, now = api_key.make(), self._clock()
        expires_at = now + lifetime_seconds if lifetime_seconds else 0.0
        info = KeyInfo(f"key_{secrets.token_hex(8)}", org, name, tuple(dict.fromkeys(roles)) or ("user",), now, expires_at)
        act = Act(actor, "CreateKey", info.key_id, json.dumps({"org": org, "name": name, "roles": info.roles, "expires_at": expires_at}))
        await self._audit.change(act, keys.API_KEYS, api_key.key_hash(key).hex(), json.dumps(asdict(info)), most=MAX_KEYS)
        return key, info

    async def listed(self, org: str = "") -> list[KeyInfo]:
        """By time of making; of one org, or all."""
        infos = [info for _, info in await self._entries() if org in ("", info.org)]
        return sorted(infos, key=lambda info: (info.created_at, info.key_id))

    async def revoke(self, actor: str, key_id: str) -> None:
        """Takes a key out. NOT_FOUND if there is none."""
        key_hash = next((key_hash for key_hash, info in await self._entries() if info.key_id == key_id), "")
        await self._audit.change(Act(actor, "RevokeKey", key_id), keys.API_KEYS, key_hash, "", most=MAX_KEYS)

    async def _entries(self) -> list[tuple[str, KeyInfo]]:
        (flat,) = await self._store.commands(["HGETALL", keys.API_KEYS])
        return [(key_hash, _parse(text)) for key_hash, text in zip(flat[::2], flat[1::2], strict=True)]


def _parse(text: str) -> KeyInfo:
    fields = json.loads(text)
    return KeyInfo(**{**fields, "roles": tuple(fields["roles"])})


def _check(name: str, roles: Sequence[str], lifetime_seconds: float) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise invalid("name", f"name is {name[:80]!r}; it must have 1 to {MAX_NAME_CHARS} printable characters")
    for role in roles:
        if role not in ROLES:
            raise invalid("roles", f"{role[:40]!r} is no role; there are: {', '.join(ROLES)}")
    if not 0 <= lifetime_seconds <= MAX_LIFETIME_SECONDS:  # NaN isn't either
        raise invalid("lifetime_seconds", f"lifetime_seconds is {lifetime_seconds:g}; it must be 0 (for ever) to {MAX_LIFETIME_SECONDS:g}")
