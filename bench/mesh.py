"""The mesh under load: the one that is up, or one started for the run on free ports in a folder of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import jwt
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from forebay.v1 import inference_pb2, inference_pb2_grpc
from services.cli import client
from services.cli.home import Home
from services.cli.keys import AUDIENCE, ISSUER


@dataclass(frozen=True)
class HttpFace:
    """An OpenAI API: this mesh's or another server's. `url` ends in /v1; no token: none is asked for."""

    url: str
    model: str
    token: str = ""


@dataclass(frozen=True)
class Mesh:
    """Where the two faces are, and the first model's facts."""

    pid: int
    """Its supervisor's; 0: it runs elsewhere."""
    keys: Path
    """Where its development key is."""
    grpc_address: str
    http_url: str
    token: str
    model: str
    vocab_size: int

    @property
    def http(self) -> HttpFace:
        """Where to ask over HTTP."""
        return HttpFace(self.http_url, self.model, self.token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every gRPC call carries."""
        return (("authorization", f"Bearer {self.token}"),)


def find() -> Mesh:
    """The mesh that FOREBAY_ADDRESS, FOREBAY_HTTP_URL and FOREBAY_TOKEN name, else what `forebay up` keeps running from FOREBAY_HOME."""
    home = Home.from_environment()
    if http_url := os.environ.get("FOREBAY_HTTP_URL"):
        target = client.find()
        return _described(0, home, target.address, http_url, target.token)
    running = home.read()
    if running is None:
        sys.exit(f"no mesh is up from {home.path}: start one with `make up`, or pass --start")
    return _described(running.pid, home, running.grpc_address, running.http_base_url, running.token)


@contextmanager
def started(up_arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Iterator[Mesh]:
    """A mesh that lives as long as the block. `environment`: settings beside those of its arguments."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        command = [sys.executable, "-m", "services.cli", "up", "--json", "--grpc-port", "0", "--http-port", "0", *up_arguments]
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {}), "FOREBAY_HOME": folder}, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            up = next((event for event in map(json.loads, process.stdout) if event["event"] == "up"), None)
            if up is None:
                sys.exit("the mesh did not come up")
            yield _described(process.pid, Home(Path(folder)), up["grpc_address"], up["http_base_url"], up["token"])
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _described(pid: int, home: Home, grpc_address: str, http_url: str, token: str) -> Mesh:
    with grpc.insecure_channel(grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        listed = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {token}"),), timeout=10)
    first = next((model for model in listed.models if "generate" in model.capabilities), listed.models[0])
    return Mesh(pid, home.keys, grpc_address, http_url, token, first.name, first.vocab_size)


def internal_addresses(mesh: Mesh) -> Mapping[str, str]:
    """host:port of /metrics by process, of a mesh that `forebay up` keeps running here."""
    running = Home(mesh.keys.parent).read()
    if running is None:
        sys.exit(f"no mesh is up from {mesh.keys.parent}: its internal addresses aren't known")
    return running.internal_addresses


def org_token(mesh: Mesh, org: str, lifetime_seconds: float = 7200.0) -> str:
    """A token by which a client of that mesh belongs to `org`, signed with its development key."""
    key = load_pem_private_key((mesh.keys / "ed25519.pem").read_bytes(), password=None)
    key_id = json.loads((mesh.keys / "jwks.json").read_bytes())["keys"][0]["kid"]
    now = time.time()
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "bench", "owner": org, "iat": now, "exp": now + lifetime_seconds}
    return jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": key_id})  # type: ignore[arg-type]  # an Ed25519 key, as it was made
