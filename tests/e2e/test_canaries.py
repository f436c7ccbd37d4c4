"""Audit X12: unique words go in by every way that there is, and are looked for wherever the mesh tells of itself."""

import base64
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
import redis

from forebay.v1 import admin_pb2, admin_pb2_grpc, explain_pb2, inference_pb2, inference_pb2_grpc, types_pb2
from services.cli.home import Home
from services.common import semconv
from services.scheduler import keys
from tests.e2e.mesh import Mesh, sdk, wait_until
from tests.spans import Receiver

WORD = "kanari"
"""Is part of every word that goes in, and of nothing that is Forebay's."""
CHAT, VECTORS = "smollm2-135m-instruct", "all-minilm-l6-v2"
IDS = [1031, 7] * 6
"""A prompt by its tokens."""
JOB_KEYS = ("parts", "results", "file", "batch", "submitted")
"""Of jobs, whose files, names and results are in Redis: the one place that holds text (ARCHITECTURE, decision 44)."""
TOOL = {
    "type": "function",
    "function": {
        "name": f"{WORD}_tool",
        "description": f"{WORD}-described",
        "parameters": {"type": "object", "properties": {f"{WORD}_parameter": {"type": "string", "enum": [f"{WORD}-one"]}}},
    },
}


@dataclass
class Told:
    """What went in or came out and must be nowhere, and what clients were told."""

    secrets: list[str] = field(default_factory=lambda: [WORD, "1031, 7, 1031", "1031,7,1031"])
    request_ids: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def answer(self, response: httpx.Response) -> Any:
        """A good answer's body."""
        assert response.status_code == 200, response.text
        self.request_ids += response.headers.get("x-forebay-request-id", "").split(",")
        return response.json()

    def refuse(self, response: httpx.Response, status: int) -> None:
        """A refusal."""
        assert response.status_code == status, response.text
        self.refusals.append(response.text)

    def said(self, text: str | None) -> None:
        """Words of a model; of short ones nothing can be told."""
        if text and len(text.strip()) > 12:
            self.secrets.append(text)


@pytest.fixture(scope="module")
def told(traced: Mesh, receiver: Receiver) -> Told:
    """All that is done to the mesh."""
    told = Told()
    made = json.loads(traced.forebay("keys", "create", "--org", "dev", "--name", "audit", "--json").stdout)
    told.secrets += [made["key"], traced.token, traced.token.rpartition(".")[2]]
    told.secrets.append((traced.home / "keys" / "ed25519.pem").read_text().splitlines()[1])
    with httpx.Client(base_url=traced.http_base_url, headers={"authorization": f"Bearer {made['key']}"}, timeout=60) as client:
        _chats(client, told)
        _completions(client, told)
        told.answer(
            client.post("/embeddings", json={"model": VECTORS, "input": [f"{WORD}-embedded", f"{WORD} again"], "user": f"{WORD}-user"})
        )
        _mistakes(client, told)
    _strangers(traced, told)
    _grpc(traced, told)
    _job(traced, sdk(traced, made["key"], timeout=60), told)
    _killed(traced, told)
    assert traced.forebay("keys", "revoke", made["info"]["key_id"]).returncode == 0
    told.refuse(httpx.get(f"{traced.http_base_url}/models", headers={"authorization": f"Bearer {made['key']}x"}), 401)
    last = told.request_ids[-1]
    receiver.wait_for(lambda spans: any(span.attributes.get(semconv.GEN_AI_RESPONSE_ID) == last for span in spans))
    return told


def _chats(client: httpx.Client, told: Told) -> None:
    asked = {
        "model": CHAT,
        "temperature": 0,
        "max_tokens": 16,
        "stop": [f"{WORD}-stop"],
        "user": f"{WORD}-user",
    }
    call = {
        "id": f"{WORD}-call",
        "type": "function",
        "function": {"name": f"{WORD}_tool", "arguments": json.dumps({f"{WORD}_parameter": 1})},
    }
    history = [
        {"role": "system", "content": f"{WORD}-system"},
        {"role": "user", "content": f"Say {WORD}-prompt"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"{WORD}-call", "content": f"{WORD}-result"},
    ]
    tools = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": f"{WORD}_tool"}}}
    schema = {"name": WORD, "schema": {"type": "object", "properties": {WORD: {"enum": [f"{WORD}-value"]}}, "required": [WORD]}}
    schema["schema"]["additionalProperties"] = False  # type: ignore[index]
    for more in (
        {"messages": history[:2]},
        {"messages": history, "tools": [TOOL], "tool_choice": "none", "logprobs": True, "top_logprobs": 2},
        {"messages": history[:2], **tools, "max_tokens": 60},
        {"messages": history[:2], "response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 60},
        {"messages": history[:2], "structured_outputs": {"choice": [f"{WORD}-choice"]}, "n": 2},
    ):
        body = told.answer(client.post("/chat/completions", json={**asked, **more}))
        told.said(body["choices"][0]["message"]["content"])
        if "structured_outputs" in more:
            assert body["choices"][0]["message"]["content"] == f"{WORD}-choice", "the model can be made to say it"
    # A stream that nobody reads to its end.
    with client.stream("POST", "/chat/completions", json={**asked, "messages": history[:2], "stream": True, "max_tokens": 400}) as stream:
        next(stream.iter_lines())
        told.request_ids.append(stream.headers["x-forebay-request-id"])


def _completions(client: httpx.Client, told: Told) -> None:
    for more in (
        {"prompt": f"{WORD}-text"},
        {"prompt": IDS},
        {"prompt": f"{WORD}-echoed", "echo": True, "logprobs": 2},
        {"prompt": [f"{WORD}-a", f"{WORD}-b"]},
    ):
        body = told.answer(
            client.post("/completions", json={"model": CHAT, "max_tokens": 16, **more}, headers={"x-forebay-class": "batch"})
        )
        told.said(body["choices"][0]["text"])


def _mistakes(client: httpx.Client, told: Told) -> None:
    """Each is told about its place; a field's value may be in its own client's answer, and must be nowhere else."""
    ask: dict[str, Any] = {"model": CHAT, "messages": [{"role": "user", "content": f"{WORD}-refused"}]}
    told.refuse(client.post("/chat/completions", json={**ask, "max_tokens": -1}), 400)
    told.refuse(client.post("/chat/completions", json={**ask, "model": "not-served"}), 404)
    told.refuse(client.post("/chat/completions", json={**ask, "max_tokens": 100_000}), 400)
    told.refuse(client.post("/completions", json={"model": CHAT, "prompt": f"{WORD} " * 20_000}), 400)
    told.refuse(client.post("/embeddings", json={"model": VECTORS, "input": f"{WORD} " * 2_000}), 400)
    late = client.post("/chat/completions", json={**ask, "max_tokens": 2000, "ignore_eos": True}, headers={"x-forebay-deadline": "0.2"})
    told.refuse(late, 504)
    for path, body in (
        ("/chat/completions", f'{{"model": "{WORD}-broken"'),
        ("/chat/completions", json.dumps({**ask, "temperature": f"{WORD}-warm"})),
        ("/chat/completions", json.dumps({**ask, f"{WORD}_field": f"{WORD}-value", "strict": True})),
        ("/completions", json.dumps({"model": CHAT, "prompt": "x", "structured_outputs": {"regex": f"{WORD}(["}})),
        ("/batches", json.dumps({"input_file_id": f"{WORD}-file", "endpoint": "/v1/completions", "completion_window": "24h"})),
        (f"/{WORD}?key={WORD}-query", "{}"),
        (f"/files/{WORD}", "{}"),
    ):
        assert 400 <= client.post(path, content=body).status_code < 500, path


def _strangers(mesh: Mesh, told: Told) -> None:
    """Keys and tokens that are nobody's."""
    head, body, _ = mesh.token.split(".")
    for value in (f"Bearer fb-{WORD}-key", f"Bearer {head}.{body}.{WORD}", f"Bearer {WORD}", f"Basic {WORD}"):
        told.refuse(httpx.get(f"{mesh.http_base_url}/models", headers={"authorization": value}), 401)
    told.secrets.append(body)


def _grpc(mesh: Mesh, told: Told) -> None:
    generate = inference_pb2.GenerateRequest(
        text=f"{WORD}-grpc",
        sampling=types_pb2.SamplingParams(max_tokens=8, grammar=types_pb2.Grammar(choice=types_pb2.Choices(choices=[f" {WORD}-yes"]))),
    )
    embed = inference_pb2.EmbedRequest(model=VECTORS, inputs=[inference_pb2.EmbedInput(text=f"{WORD}-grpc-embedded")])
    with mesh.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert WORD in "".join(event.delta.text for event in stub.Generate(generate, metadata=mesh.metadata, timeout=60))
        assert list(stub.Embed(embed, metadata=mesh.metadata, timeout=60))
        generate.sampling.max_tokens = 1 << 30
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(generate, metadata=mesh.metadata, timeout=60))
        told.refusals.append(str(refused.value.details()))
        with pytest.raises(grpc.RpcError) as stranger:
            list(stub.Generate(generate, metadata=(("authorization", f"Bearer {WORD}-grpc"),), timeout=60))
        told.refusals.append(str(stranger.value.details()))


def _job(mesh: Mesh, client: openai.OpenAI, told: Told) -> None:
    """One line that answers, one of vectors that is of the wrong endpoint, and one that is refused; then a file that isn't even lines."""
    ask = {"model": CHAT, "messages": [{"role": "user", "content": f"{WORD}-line"}], "max_tokens": 24}
    bodies = [ask, {**ask, "structured_outputs": {"choice": [f"{WORD}-picked"]}}, {**ask, "max_tokens": -1}]
    lines = [{"custom_id": f"{WORD}-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n, body in enumerate(bodies)]
    file = client.files.create(file=(f"{WORD}.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()), purpose="batch")
    headers = {"Idempotency-Key": f"{WORD}-again"}
    made = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"of": f"{WORD}-job"}}
    batch = client.batches.create(**made, extra_headers=headers)  # type: ignore[arg-type]
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the job is completed", seconds=90)
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert f"{WORD}-picked" in [result["response"]["body"]["choices"][0]["message"]["content"] for result in results]
    told.said(results[0]["response"]["body"]["choices"][0]["message"]["content"])
    assert client.files.content(done.error_file_id).text.count(WORD) == 1, "its custom_id"
    broken = client.files.create(file=(f"{WORD}-broken.jsonl", f'{{"custom_id": "{WORD}-x", "url":'.encode()), purpose="batch")
    failing = client.batches.create(**{**made, "input_file_id": broken.id})  # type: ignore[arg-type]
    wait_until(lambda: client.batches.retrieve(failing.id).status == "failed", "the broken job has failed", seconds=60)


def _killed(mesh: Mesh, told: Told) -> None:
    """A worker dies in the middle of a request, which goes on when there is one again: the flight record, and what is logged of a death."""
    ask = {"model": CHAT, "messages": [{"role": "user", "content": f"{WORD}-killed"}], "max_tokens": 800, "ignore_eos": True}
    headers = {"authorization": f"Bearer {mesh.token}"}
    before = {worker.registration.incarnation for worker in _chatting(mesh)}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(httpx.post, f"{mesh.http_base_url}/chat/completions", json=ask, headers=headers, timeout=90)
        wait_until(lambda: any(worker.heartbeat.num_running for worker in _chatting(mesh)), "the worker has it", seconds=30)
        os.kill(mesh.worker_pid("worker-1"), signal.SIGKILL)
        told.said(told.answer(asking.result())["choices"][0]["message"]["content"])
    wait_until(lambda: any(w.registration.incarnation not in before for w in _chatting(mesh)), "the worker is back", seconds=60)


def _chatting(mesh: Mesh) -> list[Any]:
    with mesh.operator() as operator:
        workers = operator.fleet().workers
    return [worker for worker in workers if worker.ready and worker.registration.worker_id == "worker-1"]


def test_what_is_told_to_whoever_looks_holds_no_word_of_requests(traced: Mesh, receiver: Receiver, told: Told) -> None:
    addresses = _internal_addresses(traced)
    plain = [httpx.get(f"http://{address}/metrics").text for address in addresses.values()]
    with_exemplars = {"accept": "application/openmetrics-text"}
    commands = (
        ["audit"],
        ["usage"],
        ["queue"],
        ["workers"],
        ["ps"],
        ["orgs", "list"],
        ["keys", "list"],
        ["batch", "list"][:0] or ["models"],
    )
    places = {
        "logs": "".join(path.read_text(errors="replace") for path in (traced.home / "logs").glob("*.log")),
        "supervisor": "never empty " * 10 + traced.home.with_name(traced.home.name + ".stderr").read_text(),
        "flight records": "".join(path.read_bytes().decode("latin-1") for path in (traced.home / "logs").glob("*.flight")),
        "spans": b"".join(receiver.raw).decode("latin-1"),
        "metrics": "".join(plain),
        "exemplars": "".join(httpx.get(f"http://{address}/metrics", headers=with_exemplars).text for address in addresses.values()),
        "health": "".join(httpx.get(f"http://{address}/health").text for address in addresses.values()) + "x" * 100,
        "commands": "".join(_said(traced, *command, "--json") for command in commands),
        "refusals": "".join(told.refusals),
        "processes": "".join(" ".join(child.cmdline()) for child in psutil.Process(traced.process.pid).children(recursive=True)),
    }
    _assert_silent(places, told)


def test_explain_holds_no_word_of_its_request_and_is_nobody_elses(traced: Mesh, told: Told) -> None:
    made = json.loads(traced.forebay("keys", "create", "--org", "others", "--name", "others", "--json").stdout)
    found, others = [], []
    with traced.channel() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for name in filter(None, told.request_ids):
            request = admin_pb2.ExplainRequest(request_id=name)
            with suppress(grpc.RpcError):
                found.append(str(stub.Explain(request, metadata=tuple(traced.metadata), timeout=10)))
            with pytest.raises(grpc.RpcError) as refused:
                stub.Explain(request, metadata=(("authorization", f"Bearer {made['key']}"),), timeout=10)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            others.append(str(refused.value.details()))
    assert len(found) >= 10
    _assert_silent({"explain": "".join(found), "others": "".join(others)}, told)


def test_redis_holds_text_of_jobs_alone(traced: Mesh, told: Told) -> None:
    wait_until(lambda: "explanation" in dict(_stored(traced)), "there are records")
    jobs = {keys.PREFIX + name for name in JOB_KEYS}
    rest = [text for key, text in _stored(traced) if not key.startswith(tuple(f"{name}:" for name in jobs))]
    assert any(WORD in text for _, text in _stored(traced)), "the job's own"
    _assert_silent({"redis": "\n".join(rest)}, told)


def _stored(mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Every key with all that it holds; explain records as text, and their kind first."""
    title = " ".join(psutil.Process(mesh.processes["valkey"]).cmdline())
    match = re.search(r"unixsocket[: ](\S+)", title)
    assert match is not None, title
    readers = {
        "string": lambda key: client.get(key),
        "hash": lambda key: client.hgetall(key),
        "list": lambda key: client.lrange(key, 0, -1),
        "set": lambda key: client.smembers(key),
        "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
    }
    with redis.Redis(unix_socket_path=match[1], decode_responses=True) as client:
        for key in client.scan_iter(count=1000):
            value = readers[client.type(key)](key)
            if key.startswith(keys.explanation("")):
                value = explain_pb2.Explanation.FromString(base64.b64decode(value))
                yield "explanation", str(value)
            yield key, f"{key} {value}"


def _said(mesh: Mesh, *arguments: str) -> str:
    done = mesh.forebay(*arguments)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout + done.stderr


def _assert_silent(places: Mapping[str, str], told: Told) -> None:
    for place, said in places.items():
        assert len(said) > 100, f"nothing was looked at: {place}"
        for secret in told.secrets:
            at = said.find(secret)
            assert at < 0, (place, secret, said[max(0, at - 200) : at + 200])


def _internal_addresses(mesh: Mesh) -> Mapping[str, str]:
    running = Home(mesh.home).read()
    assert running is not None
    return running.internal_addresses
