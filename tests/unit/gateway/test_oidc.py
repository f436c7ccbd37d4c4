"""Discovery of an issuer's keys: its own configuration, to the letter, and nobody else's."""

import json
from typing import Any

import pytest

from services.common.errors import Code, StatusError
from services.gateway.keys import KeysError
from services.gateway.oidc import OidcKeys, jwks_address
from tests.unit.gateway.test_auth import Clock, Endpoint, endpoint, only

__all__ = ["endpoint"]
ISSUER = "https://id.example/realms/x"


def configuration(**fields: Any) -> bytes:
    return json.dumps({"issuer": ISSUER, "jwks_uri": "https://keys.example/jwks"} | fields).encode()


def test_the_address_that_the_issuer_names() -> None:
    assert jwks_address(configuration(), ISSUER).geturl() == "https://keys.example/jwks"


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (configuration(issuer="https://id.example/realms/y"), "of the issuer"),
        (configuration(issuer=ISSUER + "/"), "of the issuer"),
        (configuration(issuer=ISSUER.upper()), "of the issuer"),
        (configuration(issuer=None), "of the issuer"),
        (configuration(issuer=[ISSUER]), "of the issuer"),
        (configuration(jwks_uri="http://keys.example/jwks"), "https://"),
        (configuration(jwks_uri="http://127.0.0.1/jwks"), "https://"),
        (configuration(jwks_uri="file:///etc/passwd"), "https://"),
        (configuration(jwks_uri="https://[broken"), "https://"),
        (configuration(jwks_uri="https://x:port/"), "https://"),
        (configuration(jwks_uri=5), "not a text"),
        (b'{"issuer": "https://id.example/realms/x"}', "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"nonsense", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"\xff", "not a JSON object"),
    ],
)
def test_what_is_no_configuration_of_this_issuer(document: bytes, why: str) -> None:
    with pytest.raises(KeysError, match=why):
        jwks_address(document, ISSUER)


@pytest.mark.parametrize("issuer", ["http://id.example", "id.example", "", "https://id.example?x=1", "https://id.example#x", "ftp://x"])
def test_issuers_that_cannot_be_trusted(issuer: str) -> None:
    with pytest.raises(KeysError, match="FOREBAY_OIDC_ISSUER"):
        OidcKeys(issuer)


async def test_keys_are_found_where_the_issuer_says_and_again_where_it_moves_them(endpoint: Endpoint) -> None:
    clock, root = Clock(), endpoint.url.removesuffix("/jwks")
    keys = OidcKeys(root, clock)
    endpoint.paths["/.well-known/openid-configuration"] = json.dumps({"issuer": root, "jwks_uri": f"{root}/first"})
    endpoint.paths["/first"] = only("old")
    assert await keys.find("old")
    assert await keys.find("new") is None
    assert endpoint.num_fetches == 2
    endpoint.paths["/.well-known/openid-configuration"] = json.dumps({"issuer": root, "jwks_uri": f"{root}/second"})
    endpoint.paths["/second"] = only("new")
    clock.now += 10
    assert await keys.find("new")
    assert await keys.find("old") is None
    assert endpoint.num_fetches == 4


async def test_an_issuer_that_speaks_for_another_gives_no_keys(endpoint: Endpoint) -> None:
    clock, root = Clock(), endpoint.url.removesuffix("/jwks")
    keys = OidcKeys(root, clock)
    endpoint.paths["/.well-known/openid-configuration"] = json.dumps({"issuer": root + "/", "jwks_uri": f"{root}/first"})
    endpoint.paths["/first"] = only("old")
    with pytest.raises(StatusError) as caught:
        await keys.find("old")
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "NO_KEYS")
    assert endpoint.num_fetches == 1, "the keys were not even looked at"
