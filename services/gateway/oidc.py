"""OpenID Connect discovery: an issuer says itself where its public keys are. Source: OpenID Connect Discovery 1.0, section 4."""

import json
import time
from collections.abc import Callable
from urllib.parse import SplitResult

from services.gateway.keys import KeysError, UrlKeys, download, web_address

_NAME = "FOREBAY_OIDC_ISSUER"


class OidcKeys(UrlKeys):
    """The keys of an issuer. Where they are is read anew at each refresh: an issuer may move them."""

    def __init__(self, issuer: str, clock: Callable[[], float] = time.monotonic) -> None:
        """KeysError for an issuer that can't be trusted."""
        if "?" in issuer or "#" in issuer:
            raise KeysError(f"{_NAME}={issuer[:80]}: an issuer has neither a query nor a fragment")
        super().__init__(issuer.rstrip("/") + "/.well-known/openid-configuration", clock, name=_NAME)
        self._issuer = issuer

    async def _document(self) -> bytes:
        return await download(jwks_address(await download(self._url), self._issuer))


def jwks_address(configuration: bytes, issuer: str) -> SplitResult:
    """Where an issuer's configuration says that its keys are. KeysError for another issuer's, and for an address that can't be trusted."""
    try:
        fields = json.loads(configuration)
        named, address = fields["issuer"], fields["jwks_uri"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise KeysError("its configuration is not a JSON object with issuer and jwks_uri") from None
    if named != issuer:  # to the letter: whoever may answer here must not speak for another
        raise KeysError(f"its configuration is of the issuer {str(named)[:80]!a}, not of {issuer[:80]!a}")
    if not isinstance(address, str):
        raise KeysError("its jwks_uri is not a text")
    parts = web_address(address, "jwks_uri")
    if parts.scheme != "https" and web_address(issuer, _NAME).scheme == "https":
        raise KeysError(f"jwks_uri={address[:80]}: it must be an https:// URL")
    return parts
