"""What holds at the edge of both faces before a request is looked at: a caller, a place, one typed end."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from forebay.v1 import inference_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.common.process import HttpServer
from services.gateway import interceptor
from services.gateway.catalogue import Catalogue
from services.gateway.gateway import OpenCalls
from services.gateway.http import edge
from services.gateway.metrics import GatewayMetrics
from services.gateway.server import InferenceService
from tests.fakes import WorkerCall, play
from tests.unit.gateway.build import Stack, letters, make_token, stack

TOKEN = [("authorization", make_token())]


async def failure_of(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    return from_rpc(failure.value)


async def test_without_a_token_no_message_is_parsed() -> None:
    async with stack(play(letters("x"))) as mesh:
        for name in ("Generate", "Chat"):
            call = mesh.channel.unary_stream(f"/forebay.v1.InferenceService/{name}")(b"\xff\xff\xff")
            assert (await failure_of(call)).code is Code.UNAUTHENTICATED
        call = mesh.channel.unary_unary("/forebay.v1.InferenceService/CountTokens")(b"\xff\xff\xff")
        assert (await failure_of(call)).code is Code.UNAUTHENTICATED


async def test_calls_beyond_the_bound_are_told_to_come_back_and_others_go_on() -> None:
    release = asyncio.Event()

    async def waits(call: WorkerCall) -> None:
        await call.accept()
        await release.wait()
        await play(letters("hi"))(call)

    async with stack(waits, max_open_calls=2) as mesh:
        first = mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=TOKEN)
        second = asyncio.create_task(mesh.http.post("/v1/completions", json={"prompt": "a"}))
        await mesh.workers[0].calls.until_length(2)
        refused = await failure_of(mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=TOKEN))
        assert (refused.code, refused.reason, refused.retry_after_seconds) == (Code.UNAVAILABLE, "TOO_MANY_CALLS", 1.0)
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_calls")
        assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("1", "mine")
        assert (await mesh.http.get("/health")).status_code == 200
        release.set()
        assert (await second).json()["choices"][0]["text"] == "hi"
        assert [event async for event in first][-1].HasField("finished")
        assert await still_free(mesh) == 2


async def still_free(mesh: Stack) -> int:
    """Calls that can be open at once."""
    answers = [await mesh.http.post("/v1/completions", json={"prompt": "a"}) for _ in range(2)]
    return sum(answer.status_code == 200 for answer in answers)


async def test_our_own_bug_is_a_typed_end_with_the_client_s_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(play(letters("x"))) as mesh:
        monkeypatch.setattr(Catalogue, "list", lambda *_: 1 / 0)
        answer = await mesh.http.get("/v1/models", headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["x-request-id"]) == (500, "internal", "mine")
        with capture_logs() as logs:
            answer = await mesh.http.get("/v1/models")
        assert [entry["request_id"] for entry in logs if entry["event"] == "call_failed"] == [answer.headers["x-request-id"]]
        call = mesh.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=TOKEN)
        assert (await failure_of(call)).code is Code.INTERNAL


async def test_a_message_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "MESSAGE_SECONDS", 0.05)
    async with stack(play(letters("x"))) as mesh:
        call = mesh.channel.stream_stream("/forebay.v1.InferenceService/Generate")(metadata=TOKEN)
        failure = await failure_of(call)
    assert (failure.code, failure.reason) == (Code.DEADLINE_EXCEEDED, "MESSAGE_TOO_SLOW")


async def test_an_error_that_meets_the_end_of_its_call_is_no_bug_of_ours() -> None:
    class Ended:
        def invocation_metadata(self) -> None:
            return None

        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("the call has ended")

    async def list_models(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda *_: None)

    async with stack() as mesh:
        details = cast(grpc.HandlerCallDetails, SimpleNamespace(method="/forebay.v1.InferenceService/ListModels"))
        handler = await interceptor.Edge(mesh.gateway).intercept_service(list_models, details)
        with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
            await handler.stream_unary(None, Ended())  # its error is that it has no token
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("debug", "call_ended_before_its_error")]


async def test_a_deadline_that_passes_as_the_handler_fails_is_no_error_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def until_too_late(service: InferenceService, request: object, context: Any) -> Any:
        while context.time_remaining() > 0:  # the whole loop waits: gRPC ends the call before Python hears of it
            pass
        raise StatusError(Code.NOT_FOUND, "late")

    monkeypatch.setattr(InferenceService, "CountTokens", until_too_late)
    async with stack() as mesh:
        with capture_logs() as logs:
            for _ in range(5):
                call = mesh.inference.CountTokens(inference_pb2.CountTokensRequest(text="a"), metadata=TOKEN, timeout=0.1)
                assert (await failure_of(call)).code in (Code.DEADLINE_EXCEEDED, Code.NOT_FOUND)
    assert {entry["log_level"] for entry in logs} <= {"debug"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_what_a_stop_cuts_short_is_told_to_come_back() -> None:
    begun = asyncio.Event()

    async def hangs(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    server = HttpServer(edge.Edge(hangs, OpenCalls(), GatewayMetrics(CollectorRegistry()), lambda: False), "127.0.0.1:0", drain_seconds=0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await server.start()}", trust_env=False) as client:
        waits = asyncio.create_task(client.post("/v1/completions", json={}))
        await begun.wait()
        await server.stop()
        answer = await waits
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "stopping", "1")
