"""The form of API keys: `fb_`, 43 characters of secret, 6 of checksum. Knows no owner."""

import hashlib
import re
import secrets
import string
import zlib

PREFIX = "fb_"
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SECRET_CHARS, _CHECK_CHARS = 43, 6  # 32 bytes and 4 bytes in base 62
_FORM = re.compile(rf"{PREFIX}([0-9A-Za-z]{{{_SECRET_CHARS}}})([0-9A-Za-z]{{{_CHECK_CHARS}}})")


def make() -> str:
    """A new key, of 32 random bytes."""
    secret = _base62(secrets.randbits(256), _SECRET_CHARS)
    return PREFIX + secret + _checksum(secret)


def is_key(text: str) -> bool:
    """Whether a text is a whole key, free of slips: worth asking for its owner."""
    form = _FORM.fullmatch(text)
    return form is not None and _checksum(form[1]) == form[2]


def key_hash(key: str) -> bytes:
    """What is kept of it: SHA-256, 32 bytes. Enough for a secret of 256 bits, which nobody guesses."""
    return hashlib.sha256(key.encode()).digest()


def _checksum(secret: str) -> str:
    return _base62(zlib.crc32(secret.encode()), _CHECK_CHARS)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
