"""Whose token is taken, and everything that is not (X04, B42e)."""

import asyncio
import base64
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from services.common.errors import Code, StatusError
from services.gateway.auth import Authenticator, Caller
from services.gateway.keys import FileKeys, KeysError, UrlKeys, parse

NOW = 1_800_000_000
ISSUER, AUDIENCE = "https://issuer.test", "forebay"
CLAIMS: dict[str, Any] = {"owner": "acme", "sub": "ann", "iss": ISSUER, "aud": AUDIENCE, "exp": NOW + 600, "iat": NOW, "roles": ["user"]}

ED25519 = Ed25519PrivateKey.generate()
P256 = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
STRANGER = Ed25519PrivateKey.generate()
ED25519_PEM = ED25519.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
ED25519_RAW = ED25519.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def jwks(*more: Mapping[str, object]) -> dict[str, Any]:
    keys: list[dict[str, Any]] = [
        {**OKPAlgorithm.to_jwk(ED25519.public_key(), as_dict=True), "kid": "ed", "use": "sig", "alg": "EdDSA"},
        {**ECAlgorithm.to_jwk(P256.public_key(), as_dict=True), "kid": "ec"},
        {**RSAAlgorithm.to_jwk(RSA.public_key(), as_dict=True), "kid": "rsa"},
    ]
    return {"keys": [*keys, *more]}


@dataclass
class Bench:
    """An authenticator on a clock that stands still."""

    authenticator: Authenticator

    async def ask(self, authorization: str | None) -> Caller:
        return await self.authenticator.authenticate(authorization)

    async def refusal(self, authorization: str | None) -> str:
        start = time.thread_time()
        with pytest.raises(StatusError) as caught:
            await self.ask(authorization)
        assert time.thread_time() - start < 0.2, "whatever is sent, it costs little; a collector may come by"
        assert caught.value.code is Code.UNAUTHENTICATED
        if authorization is not None and len(authorization) > 20:
            assert authorization[-20:] not in caught.value.message
        return caught.value.message


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(jwks()))
    return Bench(Authenticator(FileKeys(path), issuer=ISSUER, audience=AUDIENCE, clock=lambda: NOW))


def token(claims: Mapping[str, object] | None = None, key: Any = ED25519, algorithm: str = "EdDSA", **header: Any) -> str:
    return "Bearer " + jwt.encode({**CLAIMS, **(claims or {})}, key, algorithm, headers={"kid": "ed"} | header)


def without(name: str) -> str:
    claims = {key: value for key, value in CLAIMS.items() if key != name}
    return "Bearer " + jwt.encode(claims, ED25519, "EdDSA", headers={"kid": "ed"})


def encoded(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(header: object, claims: object) -> str:
    """A token with an honest signature over any header and any claims."""
    message = f"{encoded(header)}.{encoded(claims)}"
    return f"Bearer {message}.{encoded(ED25519.sign(message.encode()))}"


def hs256(secret: bytes) -> str:
    """A token signed with what is public."""
    message = f"{encoded({'alg': 'HS256', 'kid': 'ed'})}.{encoded(CLAIMS)}"
    return f"Bearer {message}.{encoded(hmac.digest(secret, message.encode(), 'sha256'))}"


def parts() -> list[str]:
    return token().removeprefix("Bearer ").split(".")


@pytest.mark.parametrize(("key", "algorithm", "key_id"), [(ED25519, "EdDSA", "ed"), (P256, "ES256", "ec"), (RSA, "RS256", "rsa")])
async def test_each_kind_of_key(bench: Bench, key: Any, algorithm: str, key_id: str) -> None:
    caller = await bench.ask(token(key=key, algorithm=algorithm, kid=key_id))
    assert caller == Caller("acme", "ann", frozenset({"user"}), NOW + 600.0)


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
async def test_the_scheme_is_of_any_case(bench: Bench, scheme: str) -> None:
    assert (await bench.ask(scheme + ".".join(parts()))).org == "acme"


X04: dict[str, Callable[[], str | None]] = {
    "no header": lambda: None,
    "empty": lambda: "",
    "no token": lambda: "Bearer ",
    "another scheme": lambda: "Basic dXNlcjpwYXNz",
    "the token alone": lambda: ".".join(parts()),
    "two tokens": lambda: f"{token()}, {token()}",
    "none": lambda: f"Bearer {encoded({'alg': 'none', 'kid': 'ed'})}.{encoded(CLAIMS)}.",
    "none with a signature": lambda: signed({"alg": "none", "kid": "ed"}, CLAIMS),
    "None of odd case": lambda: signed({"alg": "nOnE", "kid": "ed"}, CLAIMS),
    "no alg": lambda: signed({"kid": "ed"}, CLAIMS),
    "alg is a list": lambda: signed({"alg": ["EdDSA"], "kid": "ed"}, CLAIMS),
    "HS256 with the public key": lambda: hs256(ED25519_RAW),
    "HS256 with the public key as PEM": lambda: hs256(ED25519_PEM),
    "HS256 with the key's text in the JWKS": lambda: hs256(jwks()["keys"][0]["x"].encode()),
    "alg of another key": lambda: token(key=RSA, algorithm="RS256"),
    "stronger alg than the key's": lambda: token(key=RSA, algorithm="RS512", kid="rsa"),
    "PS256 with an RS256 key": lambda: token(key=RSA, algorithm="PS256", kid="rsa"),
    "a stranger's key": lambda: token(key=STRANGER),
    "unknown kid": lambda: token(kid="other"),
    "no kid": lambda: signed({"alg": "EdDSA"}, CLAIMS),
    "kid is a number": lambda: signed({"alg": "EdDSA", "kid": 1}, CLAIMS),
    "kid is a list": lambda: signed({"alg": "EdDSA", "kid": ["ed"]}, CLAIMS),
    "kid is null": lambda: signed({"alg": "EdDSA", "kid": None}, CLAIMS),
    "kid is a path": lambda: token(kid="../../../../dev/null"),
    "kid is a query": lambda: token(kid="x' UNION SELECT 'ed"),
    "key in the header": lambda: token(
        key=STRANGER, kid="mine", jwk={**OKPAlgorithm.to_jwk(STRANGER.public_key(), as_dict=True), "kid": "mine"}
    ),
    "key URL in the header": lambda: token(key=STRANGER, kid="mine", jku="https://evil.test/jwks.json"),
    "crit": lambda: signed({"alg": "EdDSA", "kid": "ed", "crit": ["exp"], "exp": NOW}, CLAIMS),
    "crit of the unknown": lambda: signed({"alg": "EdDSA", "kid": "ed", "crit": ["x"], "x": 1}, CLAIMS),
    "b64": lambda: signed({"alg": "EdDSA", "kid": "ed", "b64": False}, CLAIMS),
    "header is a list": lambda: signed([], CLAIMS),
    "header is no JSON": lambda: signed(b"x", CLAIMS),
    "header nests deeply": lambda: signed(b"[" * 5000, CLAIMS),
    "claims are a list": lambda: signed({"alg": "EdDSA", "kid": "ed"}, []),
    "claims are no JSON": lambda: signed({"alg": "EdDSA", "kid": "ed"}, b"x"),
    "claims are no UTF-8": lambda: signed({"alg": "EdDSA", "kid": "ed"}, b"\xff"),
    "two signatures": lambda: "Bearer " + json.dumps({"payload": parts()[1], "signatures": [{"signature": parts()[2]}] * 2}),
    "four parts": lambda: f"{token()}.{parts()[2]}",
    "five parts": lambda: "Bearer a.b.c.d.e",
    "two parts": lambda: "Bearer " + ".".join(parts()[:2]),
    "empty signature": lambda: "Bearer " + ".".join(parts()[:2]) + ".",
    "cut signature": lambda: token()[:-4],
    "changed claims": lambda: f"Bearer {parts()[0]}.{encoded({**CLAIMS, 'owner': 'other'})}.{parts()[2]}",
    "a line break inside": lambda: token()[:40] + "\n" + token()[40:],
    "padding": lambda: token() + "==",
    "not ASCII": lambda: "Bearer é.é.é",
    "100 KB": lambda: token({"filler": "x" * 100_000}),
    "100 KB of dots": lambda: "Bearer " + "." * 100_000,
    "expired": lambda: token({"exp": NOW - 31}),
    "exp now minus leeway": lambda: token({"exp": NOW - 30}),
    "no exp": lambda: without("exp"),
    "exp is text": lambda: token({"exp": str(NOW + 600)}),
    "exp is NaN": lambda: token({"exp": float("nan")}),
    "exp is infinite": lambda: token({"exp": float("inf")}),
    "exp is huge": lambda: token({"exp": 10**400}),
    "exp is true": lambda: token({"exp": True}),
    "exp is null": lambda: token({"exp": None}),
    "nbf in the future": lambda: token({"nbf": NOW + 31}),
    "nbf is text": lambda: token({"nbf": "soon"}),
    "iat in the future": lambda: token({"iat": NOW + 31}),
    "iat is text": lambda: token({"iat": "now"}),
    "wrong aud": lambda: token({"aud": "other"}),
    "aud contains ours": lambda: token({"aud": "forebay-admin"}),
    "aud list without ours": lambda: token({"aud": ["a", "b"]}),
    "aud is odd": lambda: token({"aud": 5}),
    "no aud": lambda: without("aud"),
    "wrong iss": lambda: token({"iss": "https://other.test"}),
    "iss is a part of ours": lambda: token({"iss": "https://issuer"}),
    "ours is a part of iss": lambda: token({"iss": ISSUER + ".evil.test"}),
    "iss is a list": lambda: signed({"alg": "EdDSA", "kid": "ed"}, {**CLAIMS, "iss": [ISSUER]}),
    "no iss": lambda: without("iss"),
    "no owner": lambda: without("owner"),
    "owner is empty": lambda: token({"owner": ""}),
    "owner is a number": lambda: token({"owner": 5}),
    "owner is a list": lambda: token({"owner": ["acme"]}),
    "owner is long": lambda: token({"owner": "a" * 129}),
    "owner is a path": lambda: token({"owner": "../acme"}),
    "owner has a colon": lambda: token({"owner": "acme:other"}),
    "owner ends with a line break": lambda: token({"owner": "acme\n"}),
    "owner is not ASCII": lambda: token({"owner": "аcme"}),
    "roles is text": lambda: token({"roles": "operator"}),
    "roles is an object": lambda: token({"roles": {"operator": True}}),
    "roles holds a list": lambda: token({"roles": [["operator"]]}),
    "sub is a number": lambda: token({"sub": 5}),
    "sub has control characters": lambda: token({"sub": "a\nb"}),
    "sub is long": lambda: token({"sub": "a" * 257}),
}  # fmt: skip


@pytest.mark.parametrize("name", X04)
async def test_x04(bench: Bench, name: str) -> None:
    message = await bench.refusal(X04[name]())
    assert message.isprintable()
    assert len(message) < 200


@pytest.mark.parametrize(("claim", "skew"), [("exp", -31), ("nbf", 31), ("iat", 31)])
async def test_b42e_clocks_beyond_30_seconds(bench: Bench, claim: str, skew: int) -> None:
    assert claim in await bench.refusal(token({claim: NOW + skew})) or claim == "exp"


@pytest.mark.parametrize("skew", [-29, -1, 0, 1, 29])
async def test_b42e_clocks_within_30_seconds(bench: Bench, skew: int) -> None:
    assert (await bench.ask(token({"iat": NOW + skew, "nbf": NOW + skew}))).org == "acme"
    assert (await bench.ask(token({"exp": NOW + skew}))).org == "acme"
    assert (await bench.ask(token({"iat": NOW + skew + 0.9}))).org == "acme"


@pytest.mark.parametrize(
    ("claim", "roles"),
    [
        (["user"], {"user"}),
        (["operator"], {"operator"}),
        (["user", "operator", "other"], {"user", "operator"}),
        ([], set()),
        (None, {"user"}),
    ],
)
async def test_roles(bench: Bench, claim: list[str] | None, roles: set[str]) -> None:
    caller = await bench.ask(without("roles") if claim is None else token({"roles": claim}))
    assert caller.roles == roles
    for role in ("user", "operator"):
        if role in roles:
            caller.require(role)
        else:
            with pytest.raises(StatusError) as caught:
                caller.require(role)
            assert caught.value.code is Code.PERMISSION_DENIED


async def test_issuer_and_audience_are_free_where_none_is_set(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(jwks()))
    bench = Bench(Authenticator(FileKeys(path), clock=lambda: NOW))
    assert (await bench.ask(token({"iss": "any", "aud": ["x"]}))).org == "acme"
    assert (await bench.ask(without("aud"))).org == "acme"


class Clock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def only(key_id: str) -> str:
    return json.dumps({"keys": [{**OKPAlgorithm.to_jwk(ED25519.public_key(), as_dict=True), "kid": key_id}]})


def both(*key_ids: str) -> str:
    return json.dumps({"keys": [key for name in key_ids for key in json.loads(only(name))["keys"]]})


async def test_x05_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "jwks.json", Clock()
    path.write_text(only("old"))
    keys = FileKeys(path, clock)
    assert await keys.find("old")
    (tmp_path / "new").write_text(only("new"))
    (tmp_path / "new").rename(path)
    clock.now += 1.5
    assert await keys.find("new")
    assert await keys.find("old") is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"keys": 5}', '{"keys": []}', '{"keys": [5, null, {}]}'])
async def test_x05_a_damaged_file_leaves_the_last_good_keys(tmp_path: Path, damage: str) -> None:
    path, clock = tmp_path / "jwks.json", Clock()
    path.write_text(only("old"))
    keys = FileKeys(path, clock)
    path.write_text(damage)
    clock.now += 1.5
    assert await keys.find("old")
    path.unlink()
    clock.now += 1.5
    assert await keys.find("old")
    with pytest.raises(KeysError):
        FileKeys(path)


SYMMETRIC = {"kty": "oct", "kid": "x", "k": encoded(b"x" * 32), "alg": "HS256"}
WEAK_RSA = {**RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True), "kid": "x"}
P384 = {**ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key(), as_dict=True), "kid": "x"}


@pytest.mark.parametrize(
    "entry",
    [
        SYMMETRIC, WEAK_RSA, P384, {**jwks()["keys"][0], "kid": "x", "use": "enc"}, {**jwks()["keys"][0], "kid": "x", "alg": "HS256"},
        {**jwks()["keys"][2], "kid": "x", "alg": "RS512"}, {**jwks()["keys"][0], "kid": 5}, {**jwks()["keys"][0], "kid": ""}, {"kid": "x"},
        {"kty": "OKP", "crv": "Ed25519", "x": "???", "kid": "x"}, {"kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "x"},
        {**OKPAlgorithm.to_jwk(ED25519, as_dict=True), "kid": "x"},
    ],
)  # fmt: skip
def test_keys_that_are_never_trusted(entry: Mapping[str, object]) -> None:
    assert set(parse(json.dumps(jwks(entry)))) == {"ed", "ec", "rsa"}


class Endpoint(ThreadingHTTPServer):
    """A JWKS URL on this host. `answer` is its body; `redirect` sends elsewhere instead; `down` breaks every connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_port}/jwks"
        self.answer: str | bytes = only("old")
        self.paths: dict[str, str] = {}  # other bodies, by path
        self.redirect = ""
        self.down = False
        self.num_fetches = 0


class _Answers(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self.server.num_fetches += 1
        if self.server.down:
            return  # closes without a word
        body = self.server.paths.get(self.path, self.server.answer)
        self.send_response(302 if self.server.redirect else 200)
        if self.server.redirect:
            self.send_header("location", self.server.redirect)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_x04_unknown_keys_make_no_storm_of_fetches(endpoint: Endpoint) -> None:
    clock = Clock()
    keys = UrlKeys(endpoint.url, clock)
    assert await keys.find("old")
    for number in range(100):
        clock.now += 0.09
        assert await keys.find(f"unknown{number}") is None
    assert endpoint.num_fetches == 1
    endpoint.answer = only("new")
    clock.now += 1.5
    assert await keys.find("new")
    assert await keys.find("old") is None
    assert endpoint.num_fetches == 2


async def test_x04_a_call_that_leaves_doesnt_end_the_fetch_that_it_began(endpoint: Endpoint) -> None:
    keys = UrlKeys(endpoint.url, Clock())
    first = asyncio.create_task(keys.find("old"))
    await asyncio.sleep(0)  # it begins
    first.cancel()
    assert await keys.find("old"), "though nothing is fetched again for 10 s"
    assert endpoint.num_fetches == 1
    assert first.cancelled()


async def test_x05_rotation_under_load(endpoint: Endpoint) -> None:
    """200 at once in every second of a rotation: valid tokens are taken throughout, with a fetch in 10 s at most."""
    clock = Clock()
    keys = UrlKeys(endpoint.url, clock)
    authenticator = Authenticator(keys, issuer=ISSUER, audience=AUDIENCE, clock=lambda: NOW)
    stages = [(only("old"), ("old",)), (both("old", "new"), ("old", "new")), (only("new"), ("new",))]
    for document, valid in stages:
        endpoint.answer = document
        clock.now += 300  # old keys are looked at again
        for second in range(20):
            clock.now += 1
            endpoint.down = second % 3 == 1  # what is known lasts
            names = [valid[number % len(valid)] for number in range(200)]
            callers = await asyncio.gather(*(authenticator.authenticate(token(kid=name)) for name in names))
            assert {caller.org for caller in callers} == {"acme"}
    with pytest.raises(StatusError) as caught:
        await authenticator.authenticate(token(kid="old"))
    assert caught.value.code is Code.UNAUTHENTICATED
    assert endpoint.num_fetches <= (clock.now - 1000) / 10


async def test_x05_a_removed_key_ends_with_the_cache(endpoint: Endpoint) -> None:
    clock = Clock()
    keys = UrlKeys(endpoint.url, clock)
    assert await keys.find("old")
    endpoint.answer = only("new")
    clock.now += 299
    assert await keys.find("old")
    clock.now += 2
    assert await keys.find("old") is None


async def test_x05_the_last_good_keys_outlive_the_endpoint_for_an_hour(endpoint: Endpoint) -> None:
    clock = Clock()
    keys = UrlKeys(endpoint.url, clock)
    assert await keys.find("old")
    endpoint.down = True
    clock.now += 3599
    assert await keys.find("old")
    clock.now += 2
    with pytest.raises(StatusError) as caught:
        await keys.find("old")
    assert caught.value.code is Code.UNAVAILABLE


async def test_keys_are_neither_huge_nor_from_elsewhere(endpoint: Endpoint) -> None:
    clock = Clock()
    keys = UrlKeys(endpoint.url, clock)
    assert await keys.find("old")
    endpoint.answer = only("new").encode() + b" " * (1 << 20)
    clock.now += 301
    assert await keys.find("new") is None
    endpoint.answer, endpoint.redirect = only("new"), endpoint.url + "2"
    clock.now += 301
    assert await keys.find("new") is None
    assert endpoint.num_fetches == 3  # the redirect was not followed
    endpoint.redirect = ""
    clock.now += 301
    assert await keys.find("new")


async def test_keys_that_trickle_in_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = asyncio.Event()

    async def trickles(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:  # each byte well within any time for one
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            gone.set()
        finally:
            writer.close()

    monkeypatch.setattr("services.gateway.keys._FETCH_SECONDS", 0.1)
    server = await asyncio.start_server(trickles, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StatusError) as caught:
            await UrlKeys(f"http://127.0.0.1:{port}").find("any")
        assert caught.value.code is Code.UNAVAILABLE
        await gone.wait()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "jwks.json", "", "http://issuer.example/jwks", "https://"])
def test_only_web_addresses_are_fetched(url: str) -> None:
    with pytest.raises(KeysError, match="https"):
        UrlKeys(url)
