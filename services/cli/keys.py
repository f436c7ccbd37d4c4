"""The development identity of a mesh: an Ed25519 key, its JWKS file and one token, private and reused while valid."""

import base64
import json
import time
from dataclasses import dataclass
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from services.cli import private_file
from services.cli.problem import Problem

ISSUER = "forebay-dev"
AUDIENCE = "forebay"
OWNER = "dev"
_LIFETIME_SECONDS = 30 * 86400
# A token that ends sooner is made anew at the next start, so that no mesh outlives its own token by surprise.
_RENEW_SECONDS = 7 * 86400


@dataclass(frozen=True)
class Identity:
    """What gateways verify with, and what a client shows them."""

    jwks_path: Path
    token: str
    renewed: bool


def ensure(directory: Path) -> Identity:
    """The identity in `directory`, made where there is none."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    key = _load_or_make_key(directory / "ed25519.pem")
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    key_id = _base64url(public)[:16]
    jwk = {"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig", "kid": key_id, "x": _base64url(public)}
    jwks_path = directory / "jwks.json"
    # Public keys, and containers under another user id mount this file; the folder stays private.
    private_file.write(jwks_path, json.dumps({"keys": [jwk]}, indent=2).encode(), mode=0o644)
    token_path = directory / "token"
    kept = _still_valid(token_path, key)
    token = kept or _make_token(key, key_id)
    if kept is None:
        private_file.write(token_path, token.encode())
    return Identity(jwks_path, token, renewed=kept is None)


def _load_or_make_key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        key = Ed25519PrivateKey.generate()
        private_file.write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return key
    try:
        loaded = load_pem_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise Problem(f"{path} is not a private key: remove it and a new one is made") from error
    if not isinstance(loaded, Ed25519PrivateKey):
        raise Problem(f"{path} is not an Ed25519 key: remove it and a new one is made")
    return loaded


def _make_token(key: Ed25519PrivateKey, key_id: str) -> str:
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "developer", "owner": OWNER, "roles": ["user", "operator"]}
    return jwt.encode({**claims, "iat": now, "exp": now + _LIFETIME_SECONDS}, key, algorithm="EdDSA", headers={"kid": key_id})


def _still_valid(path: Path, key: Ed25519PrivateKey) -> str | None:
    if not path.exists():
        return None
    token = path.read_text().strip()
    try:
        claims = jwt.decode(token, key.public_key(), algorithms=["EdDSA"], audience=AUDIENCE, issuer=ISSUER)
    except jwt.PyJWTError:
        return None
    return token if claims["exp"] - time.time() > _RENEW_SECONDS else None


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
