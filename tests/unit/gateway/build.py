"""A gateway for tests: both faces on real sockets, a byte-per-token model, real tokens, and a scripted mesh behind it."""

import base64
import functools
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import jwt
import orjson
import tokenizers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from prometheus_client import CollectorRegistry

from forebay.v1 import admin_pb2_grpc, batch_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.common import rpc
from services.common.process import HttpServer
from services.gateway.answers import Keeping
from services.gateway.api_keys import ApiKeys
from services.gateway.auth import Authenticator
from services.gateway.catalogue import Catalogue
from services.gateway.fleet import FleetWatch
from services.gateway.gateway import Gateway, OpenCalls
from services.gateway.http.app import create_app
from services.gateway.http.connection import Connection, ConnectionLimits
from services.gateway.keys import FileKeys
from services.gateway.mesh import Mesh, MeshLimits
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models, ServedModel
from services.gateway.orgs import Orgs
from services.gateway.request import Generation
from services.gateway.server import make_server
from services.gateway.text.template import ChatTemplate
from services.gateway.validator import Sampling
from services.policy import catalogue as public_models
from services.text.compiler import Compiler
from services.text.tokenizer import SpecialTokens, Tokenizer, Vocabulary, byte_level_alphabet
from tests.fakes import FakeScheduler, FakeWorker, Script

EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 2048
ISSUER, AUDIENCE = "https://issuer.test", "forebay"
FAST = MeshLimits(worker_silence=20.0, scheduler_answer=20.0, replace_patience=10.0, exclusion=0.2, backoff=0.01)
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
_KEEPING = Keeping()
_NO_ENTRIES: public_models.Catalogue = {}
_KEY = Ed25519PrivateKey.generate()
_numbers = itertools.count()


def letters(text: str) -> list[int]:
    """The ids of a text: one per byte."""
    return list(text.encode())


def _backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def make_tokenizer() -> Tokenizer:
    """One token per byte, and an end token."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    return Tokenizer(_backend(), Vocabulary(pieces, SpecialTokens(ids=frozenset({EOS}), eos="<eos>")))


def write_model(folder: Path) -> Path:
    """The same model as a folder, as far as a gateway reads one."""
    folder.mkdir()
    backend = _backend()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": _TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}))
    return folder


def make_model(**fields: Any) -> ServedModel:
    """The model "tiny", also called "small"."""
    tokenizer = make_tokenizer()
    defaults: dict[str, Any] = {
        "name": "tiny",
        "aliases": ("small",),
        "tokenizer": tokenizer,
        "template": ChatTemplate(_TEMPLATE, tokenizer.special),
        "context_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "created": 1_700_000_000,
        "compiler": Compiler(tokenizer, VOCAB_SIZE, [EOS]),
        "max_model_len": MAX_MODEL_LEN,
        "level": "fp32",
        "version": "0123456789abcdef",
        "ready": True,
    }
    return ServedModel(**defaults | fields)


def generation(
    prompt: Sequence[int] = (1, 2, 3), *, org: str = "acme", deadline_seconds: float = 30.0, echo: bool = False, **sampling: Any
) -> Generation:
    """An admitted request, as the mesh client takes it."""
    return Generation(
        request_id=f"{next(_numbers):032x}",
        org=org,
        latency_class=types_pb2.LATENCY_CLASS_STANDARD,
        model=make_model(),
        prompt_token_ids=list(prompt),
        prompt_text=None,
        sampling=Sampling(**{"max_tokens": 64, "temperature": 0.0, "seed": 1} | sampling),
        echo=echo,
        label="",
        deadline_seconds=deadline_seconds,
    )


def make_token(org: str = "acme", *roles: str, **claims: Any) -> str:
    """An authorization header for an org; roles default to user."""
    now = int(time.time())
    payload = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "someone",
        "owner": org,
        "roles": list(roles or ("user",)),
        "iat": now,
        "exp": now + 600,
    }
    return "Bearer " + jwt.encode(payload | claims, _KEY, algorithm="EdDSA", headers={"kid": "k1"})


def write_jwks(path: Path) -> Path:
    """The public key of `make_token`."""
    public = _KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    x = base64.urlsafe_b64encode(public).rstrip(b"=").decode()
    path.write_text(json.dumps({"keys": [{"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig", "kid": "k1", "x": x}]}))
    return path


@dataclass
class Stack:
    """A running gateway and what is around it."""

    gateway: Gateway
    scheduler: FakeScheduler
    workers: list[FakeWorker]
    registry: CollectorRegistry
    http_address: str
    grpc_address: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    inference: Any
    admin: Any

    @staticmethod
    def token(org: str = "acme", *roles: str, **claims: Any) -> str:
        return make_token(org, *roles, **claims)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@asynccontextmanager
async def stack(
    *scripts: Script | FakeWorker,
    limits: MeshLimits = FAST,
    slow_reader_seconds: float = 30.0,
    max_tokens_cap: int = 32_768,
    max_open_calls: int = 2048,
    keeping: Keeping = _KEEPING,
    public: public_models.Catalogue = _NO_ENTRIES,
    others: Sequence[ServedModel] = (),
    batches: batch_pb2_grpc.BatchServiceServicer | None = None,
    **model: Any,
) -> AsyncIterator[Stack]:
    """A gateway over one scheduler and a worker per script, with clients that carry a user's token. `model`: changes to "tiny"."""
    max_model_len = model.get("max_model_len", MAX_MODEL_LEN)
    workers = [
        script if isinstance(script, FakeWorker) else FakeWorker(script, f"w{number}", max_model_len=max_model_len)
        for number, script in enumerate(scripts)
    ]
    scheduler = FakeScheduler(workers)
    scheduler.batches = batches
    for server in (*workers, scheduler):
        await server.start()
    registry = CollectorRegistry()
    models, mesh = Models([make_model(**{"ready": False} | model), *others]), Mesh([scheduler.address], limits)
    with tempfile.TemporaryDirectory() as folder:
        keys = FileKeys(write_jwks(Path(folder) / "jwks.json"))
        orgs = Orgs(mesh, keeping)
        gateway = Gateway(
            Authenticator(keys, issuer=ISSUER, audience=AUDIENCE, api_key_owner=ApiKeys(mesh, keeping).caller),
            Catalogue(models, lambda: public),
            mesh,
            orgs,
            FleetWatch(mesh, models, orgs),
            GatewayMetrics(registry),
            calls=OpenCalls(max_open_calls),
            max_tokens_cap=max_tokens_cap,
            slow_reader_seconds=slow_reader_seconds,
        )
        await gateway.fleet.look()
        grpc_server, _ = make_server(gateway)
        grpc_port = rpc.bind(grpc_server, "127.0.0.1:0")
        await grpc_server.start()
        connection = functools.partial(Connection, ConnectionLimits())
        http_server = HttpServer(create_app(gateway), "127.0.0.1:0", drain_seconds=1, protocol=connection)
        http_address = f"127.0.0.1:{await http_server.start()}"
        channel = rpc.channel(f"127.0.0.1:{grpc_port}")
        client = httpx.AsyncClient(base_url=f"http://{http_address}", headers={"authorization": make_token()}, timeout=30, trust_env=False)
        inference, admin = inference_pb2_grpc.InferenceServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)
        try:
            yield Stack(
                gateway, scheduler, workers, registry, http_address, f"127.0.0.1:{grpc_port}", client, channel, inference, admin
            )  # fmt: skip
        finally:
            await client.aclose()
            await channel.close()
            await http_server.stop()
            await grpc_server.stop(0)
            await mesh.close()
            for server in (scheduler, *workers):
                await server.stop()


def text_of(events: Iterable[Any], choice: int = 0) -> str:
    """What a choice says in events of a generation."""
    return "".join(event.text for event in events if isinstance(event, inference_pb2.Delta) and event.choice_index == choice)


async def events_of(mesh: Stack, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    """The server-sent events of a streamed request: objects, and "[DONE]" as it is."""
    answer = await mesh.http.post(path, json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for line in answer.text.split("\n\n"):
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else orjson.loads(data))
    return events
