"""What holds at the edge of both faces before a request is looked at: a caller, a place, one typed end."""

import asyncio
from typing import Any

import grpc
import pytest

from forebay.v1 import inference_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.gateway import interceptor
from services.gateway.models import Catalogue
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
        monkeypatch.setattr(Catalogue, "list", lambda _: 1 / 0)
        answer = await mesh.http.get("/v1/models", headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["x-request-id"]) == (500, "internal", "mine")
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
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("the call has ended")

    with pytest.raises(asyncio.CancelledError):
        await interceptor._end(Ended(), StatusError(Code.DEADLINE_EXCEEDED, "late"))
