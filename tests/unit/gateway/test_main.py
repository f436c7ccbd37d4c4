"""The gateway as a process: it comes up without a scheduler, says where it listens, drains, and blames settings in one line."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli import authority
from services.common.tls import role_name
from services.gateway.__main__ import main, serve
from services.gateway.mesh import Mesh
from services.gateway.settings import GatewaySettings
from tests.fakes import LENGTH, FakeScheduler, FakeWorker, WorkerCall, play
from tests.unit.gateway.build import AUDIENCE, ISSUER, letters, make_token, write_jwks, write_model

_BROKEN_POLICY = Path(__file__).parent / "broken_policy.yaml"


def environment(tmp_path: Path, schedulers: str) -> dict[str, str]:
    return {
        "FOREBAY_GRPC_ADDRESS": "127.0.0.1:0",
        "FOREBAY_HTTP_ADDRESS": "127.0.0.1:0",
        "FOREBAY_SCHEDULERS": schedulers,
        "FOREBAY_MODELS": f"{write_model(tmp_path / 'model')}=tiny|small",
        "FOREBAY_JWKS_FILE": str(write_jwks(tmp_path / "jwks.json")),
        "FOREBAY_JWT_ISSUER": ISSUER,
        "FOREBAY_JWT_AUDIENCE": AUDIENCE,
    }


@asynccontextmanager
async def running(
    tmp_path: Path, schedulers: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[dict[str, Any], asyncio.Event, asyncio.Task[None]]]:
    """What it announces, its stop signal and its task."""
    for name, value in environment(tmp_path, schedulers).items():
        monkeypatch.setenv(name, value)
    announced: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr("services.gateway.__main__.announce", lambda event, **facts: announced.set_result({"event": event, **facts}))
    stop = asyncio.Event()
    task = asyncio.create_task(serve(GatewaySettings(), stop))  # type: ignore[call-arg]  # the environment gives the fields
    await asyncio.wait({task, announced}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield announced.result(), stop, task
    finally:
        stop.set()
        await task


async def test_it_comes_up_alone_and_is_ready_when_the_fleet_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(play(letters("hi")))
    scheduler = FakeScheduler([worker])
    address = await scheduler.start()
    await scheduler.stop()
    await worker.start()
    async with running(tmp_path, address, monkeypatch) as (announced, _, _task), httpx.AsyncClient(trust_env=False) as client:
        assert announced["event"] == "listening"
        assert announced["service"] == "gateway"
        internal, public = f"http://{announced['internal_address']}", f"http://{announced['http_address']}"
        assert (await client.get(f"{internal}/ready")).status_code == 503
        assert (await client.get(f"{public}/health")).status_code == 200
        answer = await client.post(f"{public}/v1/completions", json={"prompt": "a"}, headers={"authorization": make_token()})
        assert answer.status_code == 503
        await scheduler.start(address)
        while (await client.get(f"{public}/ready")).status_code != 200:
            await scheduler.looks.until_length(len(scheduler.looks) + 1)
        answer = await client.post(f"{public}/v1/completions", json={"prompt": "a"}, headers={"authorization": make_token()})
        assert answer.json()["choices"][0]["text"] == "hi"
        metrics = (await client.get(f"{internal}/metrics")).text
        assert 'forebay_requests_total{face="http",latency_class="standard",model="tiny",status="OK"} 1.0' in metrics
        await scheduler.finishes.until_length(1)
    await scheduler.stop()
    await worker.stop()


async def test_both_faces_speak_tls_where_a_certificate_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = tmp_path / "certs", role_name("gateway")
    authority.make(folder)
    monkeypatch.setenv("FOREBAY_PUBLIC_TLS_CERT_FILE", str(authority.certificate(folder, "gateway")))
    monkeypatch.setenv("FOREBAY_PUBLIC_TLS_KEY_FILE", str(authority.key(folder, "gateway")))
    ca = authority.certificate(folder, "ca")
    async with running(tmp_path, "127.0.0.1:1", monkeypatch) as (announced, _, _):
        async with httpx.AsyncClient(trust_env=False, verify=ssl.create_default_context(cafile=ca)) as client:
            url = f"https://{announced['http_address']}/health"
            assert (await client.get(url, extensions={"sni_hostname": name})).status_code == 200
            with pytest.raises(httpx.HTTPError):
                await client.get(url.replace("https", "http"))
        options = [("grpc.ssl_target_name_override", name)]
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        async with grpc.aio.secure_channel(announced["grpc_address"], credentials, options=options) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        answer = await _ask_by_tls(announced["http_address"], ca, name, b"no HTTP\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")


async def _ask_by_tls(address: str, ca: Path, name: str, words: bytes) -> bytes:
    """What comes back until the other side closes."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=ca)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
    writer.write(words)
    answer = await reader.read()
    writer.close()
    return answer


async def test_each_face_holds_so_many_connections_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_MAX_CONNECTIONS", "1")
    async with running(tmp_path, "127.0.0.1:1", monkeypatch) as (announced, _, _), httpx.AsyncClient(trust_env=False) as first:
        url = f"http://{announced['http_address']}/health"
        assert (await first.get(url)).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as second:
            refused = await second.get(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert (await first.get(url)).status_code == 200
        channels = [grpc.aio.insecure_channel(announced["grpc_address"], [("grpc.use_local_subchannel_pool", 1)]) for _ in range(2)]
        request = health_pb2.HealthCheckRequest()
        await health_pb2_grpc.HealthStub(channels[0]).Check(request)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await health_pb2_grpc.HealthStub(channels[1]).Check(request)
        for channel in channels:
            await channel.close()


async def test_on_stop_open_streams_go_on_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()

    async def slow(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("be"))
        await release.wait()
        await call.tokens(letters("gun"), reason=LENGTH)
        await call.complete()

    worker = FakeWorker(slow)
    scheduler = FakeScheduler([worker])
    await worker.start()
    async with (
        running(tmp_path, await scheduler.start(), monkeypatch) as (announced, stop, task),
        httpx.AsyncClient(trust_env=False) as client,
    ):
        url, headers = f"http://{announced['http_address']}/v1/completions", {"authorization": make_token()}
        async with client.stream("POST", url, json={"prompt": "a", "stream": True}, headers=headers) as answer:
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            stop.set()
            internal = f"http://{announced['internal_address']}/ready"
            while (await client.get(internal)).status_code != 503:
                pass
            assert not task.done()
            release.set()
            rest = [line.removeprefix("data: ") async for line in lines if line]
        assert first["choices"][0]["text"] + "".join(json.loads(line)["choices"][0]["text"] for line in rest[:-1]) == "begun"
        assert rest[-1] == "[DONE]"
        await task
        assert len(scheduler.finishes) == 1
    await scheduler.stop()
    await worker.stop()


async def test_the_catalogue_is_read_again_and_a_bad_change_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, policy = FakeWorker(play(letters("hi"))), tmp_path / "policy.yaml"
    scheduler = FakeScheduler([worker])
    await worker.start()
    policy.write_text("models: {first: {targets: tiny}}")
    monkeypatch.setenv("FOREBAY_POLICY_FILE", str(policy))
    async with (
        running(tmp_path, await scheduler.start(), monkeypatch) as (announced, _, _task),
        httpx.AsyncClient(headers={"authorization": make_token()}, trust_env=False) as client,
    ):
        url = f"http://{announced['http_address']}/v1/models"

        async def names() -> list[str]:
            return [model["id"] for model in (await client.get(url)).json()["data"]]

        assert await names() == ["first"]
        policy.write_text("models: {second: {targets: tiny}}")
        while await names() != ["second"]:
            await scheduler.looks.until_length(len(scheduler.looks) + 1)
        policy.write_text("models: {third: {targets: []}}")
        for _ in range(3):
            await scheduler.looks.until_length(len(scheduler.looks) + 1)
            assert await names() == ["second"]
    await scheduler.stop()
    await worker.stop()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FOREBAY_SCHEDULERS": None}, "FOREBAY_SCHEDULERS"),
        ({"FOREBAY_SCHEDULERS": " , "}, "FOREBAY_SCHEDULERS"),
        ({"FOREBAY_MODELS": "/nowhere=tiny"}, "/nowhere"),
        ({"FOREBAY_JWKS_FILE": None}, "FOREBAY_JWKS_FILE"),
        ({"FOREBAY_JWKS_FILE": "/nowhere.json"}, "/nowhere.json"),
        ({"FOREBAY_OIDC_ISSUER": "https://id.example"}, "set one of FOREBAY_JWKS_FILE"),
        ({"FOREBAY_JWKS_FILE": None, "FOREBAY_OIDC_ISSUER": "http://id.example"}, "FOREBAY_OIDC_ISSUER=http://id.example"),
        ({"FOREBAY_JWKS_FILE": None, "FOREBAY_OIDC_ISSUER": "https://id.example"}, "FOREBAY_JWT_ISSUER and FOREBAY_OIDC_ISSUER differ"),
        ({"FOREBAY_POLICY_FILE": "/nowhere.yaml"}, "/nowhere.yaml"),
        ({"FOREBAY_POLICY_FILE": str(_BROKEN_POLICY)}, f"{_BROKEN_POLICY}:2: "),
        ({"FOREBAY_TLS_CERT_FILE": "/nowhere.pem"}, "FOREBAY_TLS_KEY_FILE and FOREBAY_TLS_CA_FILE must be set, too"),
        ({f"FOREBAY_TLS_{name}_FILE": f"/no/{name}" for name in ("CERT", "KEY", "CA")}, "FOREBAY_TLS_CERT_FILE=/no/CERT: No such file"),
        ({"FOREBAY_PUBLIC_TLS_KEY_FILE": "/nowhere.key"}, "FOREBAY_PUBLIC_TLS_CERT_FILE must be set, too"),
        ({"FOREBAY_LOG_LEVEL": "loud"}, "FOREBAY_LOG_LEVEL=loud"),
    ],
)
def test_a_wrong_setting_is_one_line(
    change: dict[str, str | None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.common.log.setup", lambda *_: None)
    for name, value in (environment(tmp_path, "127.0.0.1:1") | change).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert main() == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert words in out.err
    assert len(out.err.strip().splitlines()) == 1


async def test_a_taken_address_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("FOREBAY_INTERNAL_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(OSError, match="choose another port"):
            async with running(tmp_path, "127.0.0.1:1", monkeypatch):
                pass
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_ends_the_watch_of_the_fleet_ends_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(address: str) -> None:
        async with running(tmp_path, address, monkeypatch) as (_, _stop, task):
            monkeypatch.setattr(Mesh, "fleet", lambda *_: 1 / 0)
            await asyncio.wait({task})

    scheduler = FakeScheduler([])
    with pytest.raises(ZeroDivisionError):
        await life(await scheduler.start())
    await scheduler.stop()
