"""The gRPC face over a real channel, against a scripted mesh."""

import asyncio
from typing import Any

import grpc
import pytest

from forebay.v1 import admin_pb2, inference_pb2, types_pb2
from services.common import rpc
from services.common.errors import Code, StatusError, from_rpc, unavailable
from tests.fakes import LENGTH, STOP, WorkerCall, play, stall
from tests.unit.gateway.build import EOS, MAX_MODEL_LEN, Stack, letters, make_token, stack, text_of

Sampling = types_pb2.SamplingParams


def metadata(token: str | None = None) -> list[tuple[str, str]]:
    return [("authorization", token or make_token())]


async def ask(mesh: Stack, request: Any, *, timeout: float | None = 20, token: str | None = None) -> list[Any]:
    """Every event of a Generate or Chat call; a failure as StatusError."""
    method = mesh.inference.Chat if isinstance(request, inference_pb2.ChatRequest) else mesh.inference.Generate
    try:
        return [getattr(r, r.WhichOneof("event")) async for r in method(request, timeout=timeout, metadata=metadata(token))]
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None


async def test_generate_from_text_and_from_tokens() -> None:
    async with stack(play([*letters("Paris"), EOS], reason=STOP, cached_tokens=2)) as mesh:
        by_text = await ask(mesh, inference_pb2.GenerateRequest(model="tiny", text="ab", label="mine", sampling=Sampling(seed=7)))
        by_ids = await ask(mesh, inference_pb2.GenerateRequest(tokens=types_pb2.TokenIds(ids=letters("ab"))))
        assert (
            list(mesh.workers[0].calls[0].request.prompt_token_ids)
            == list(mesh.workers[0].calls[1].request.prompt_token_ids)
            == letters("ab")
        )
    for events in (by_text, by_ids):
        assert text_of(events) == "Paris"
        assert [type(event).__name__ for event in (events[0], events[-1])] == ["Started", "Finished"]
        assert list(events[-1].reasons) == [STOP]
        assert events[-1].usage == types_pb2.Usage(prompt_tokens=2, completion_tokens=6, cached_tokens=2)
    assert (by_text[0].label, by_text[0].seed, by_text[0].latency_class) == ("mine", 7, types_pb2.LATENCY_CLASS_STANDARD)


async def test_chat_renders_the_template() -> None:
    async with stack(play(letters("hi"))) as mesh:
        messages = [inference_pb2.ChatMessage(role="system", content="be brief"), inference_pb2.ChatMessage(role="user", content="hello")]
        events = await ask(mesh, inference_pb2.ChatRequest(messages=messages, latency_class=types_pb2.LATENCY_CLASS_BATCH))
        prompt = bytes(mesh.workers[0].calls[0].request.prompt_token_ids).decode()
    assert prompt == "[system]be brief\n[user]hello\n[assistant]"
    assert text_of(events) == "hi"
    assert events[0].latency_class == types_pb2.LATENCY_CLASS_BATCH


async def test_both_faces_give_the_worker_the_same_request() -> None:
    async with stack(play(letters("x"))) as mesh:
        json_fields = {
            "max_tokens": 9, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.3,
            "frequency_penalty": -0.3, "repetition_penalty": 1.1, "seed": 3, "n": 2, "ignore_eos": True, "stop_token_ids": [5],
        }  # fmt: skip
        await mesh.http.post("/v1/completions", json={"prompt": "ab", "logit_bias": {"7": 1.5}, "logprobs": 3, **json_fields})
        sampling = Sampling(logprobs=3, logit_bias={7: 1.5}, **json_fields)
        await ask(mesh, inference_pb2.GenerateRequest(text="ab", sampling=sampling))
        first, second = (call.request for call in mesh.workers[0].calls)
    assert first.sampling == second.sampling
    assert first.sampling.max_tokens == 9
    for request in (first, second):
        request.ClearField("request_id")
        request.ClearField("waited_seconds")
        request.delivery.ClearField("stream")
    assert first == second


async def test_count_list_and_get() -> None:
    async with stack(play([])) as mesh:
        counted = await mesh.inference.CountTokens(inference_pb2.CountTokensRequest(text="hé"), metadata=metadata())
        assert (counted.num_tokens, list(counted.token_ids), counted.max_model_len) == (3, letters("hé"), MAX_MODEL_LEN)
        conversation = inference_pb2.Conversation(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        counted = await mesh.inference.CountTokens(inference_pb2.CountTokensRequest(conversation=conversation), metadata=metadata())
        assert bytes(counted.token_ids).decode() == "[user]hi\n[assistant]"
        listed = await mesh.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata())
        got = await mesh.inference.GetModel(inference_pb2.GetModelRequest(name="small"), metadata=metadata())
        assert list(listed.models) == [got.model]
        assert (got.model.name, got.model.ready, got.model.level, got.model.max_model_len) == ("tiny", True, "fp32", MAX_MODEL_LEN)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await mesh.inference.GetModel(inference_pb2.GetModelRequest(name="none"), metadata=metadata())
        assert failure.value.code() is Code.NOT_FOUND


async def test_errors_carry_google_rpc_details() -> None:
    async with stack(play([])) as mesh:
        with pytest.raises(StatusError) as failure:
            await ask(mesh, inference_pb2.GenerateRequest(text="a", sampling=Sampling(temperature=-1)))
        assert failure.value.code is Code.INVALID_ARGUMENT
        assert failure.value.violations[0].field == "temperature"
        mesh.scheduler.refusals.append(unavailable("the queue is full: try again", 4.0, reason="QUEUE_FULL"))
        with pytest.raises(StatusError) as failure:
            await ask(mesh, inference_pb2.GenerateRequest(text="a"))
        assert (failure.value.code, failure.value.retry_after_seconds, failure.value.reason) == (Code.UNAVAILABLE, 4.0, "QUEUE_FULL")


@pytest.mark.parametrize(
    "request_",
    [
        inference_pb2.GenerateRequest(),
        inference_pb2.GenerateRequest(text=""),
        inference_pb2.GenerateRequest(tokens=types_pb2.TokenIds()),
        inference_pb2.GenerateRequest(tokens=types_pb2.TokenIds(ids=[-1])),
        inference_pb2.GenerateRequest(tokens=types_pb2.TokenIds(ids=[257])),
        inference_pb2.GenerateRequest(text="a", latency_class=77),  # type: ignore[arg-type]
        inference_pb2.GenerateRequest(text="a", label="x" * 129),
        inference_pb2.GenerateRequest(text="a", label="a\nb"),
        inference_pb2.GenerateRequest(text="a", sampling=Sampling(max_tokens=0)),
        inference_pb2.GenerateRequest(text="x" * ((1 << 20) + 1)),
        inference_pb2.ChatRequest(),
        inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="boss", content="x")]),
        inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="x")] * 2),
    ],
)
async def test_client_s_mistakes_are_invalid_argument(request_: Any) -> None:
    async with stack(play(letters("x"))) as mesh:
        with pytest.raises(StatusError) as failure:
            await ask(mesh, request_)
        assert failure.value.code is Code.INVALID_ARGUMENT
        assert not mesh.scheduler.places


async def test_bytes_that_are_no_message_are_the_client_s_mistake() -> None:
    async with stack(play(letters("x"))) as mesh:
        for name in ("Generate", "Chat"):
            call = mesh.channel.unary_stream(f"/forebay.v1.InferenceService/{name}")(b"\xff\xff\xff", metadata=metadata())
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            assert failure.value.code() is Code.INVALID_ARGUMENT
        call = mesh.channel.unary_unary("/forebay.v1.InferenceService/CountTokens")(b"\x0a\x05\xff\xff\xff\xff\xff", metadata=metadata())
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is Code.INVALID_ARGUMENT


async def test_b41_a_message_over_the_limit_names_it() -> None:
    async with stack(play(letters("x"))) as mesh:
        wide = grpc.aio.insecure_channel(mesh.grpc_address, options=[("grpc.max_send_message_length", 64 << 20)])
        method = wide.unary_stream(
            "/forebay.v1.InferenceService/Generate", request_serializer=inference_pb2.GenerateRequest.SerializeToString
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await method(inference_pb2.GenerateRequest(text="x" * (9 << 20)), metadata=metadata()).read()
        assert failure.value.code() is Code.RESOURCE_EXHAUSTED
        assert str(rpc.MAX_MESSAGE_BYTES) in str(failure.value.details())
        within = inference_pb2.GenerateRequest(tokens=types_pb2.TokenIds(ids=[5] * (5 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await method(within, metadata=metadata()).read()
        assert failure.value.code() is Code.INVALID_ARGUMENT  # larger than gRPC's default of 4 MiB, so it was read
        await wide.close()


async def test_b11_an_engine_error_is_no_ok_and_spares_the_others() -> None:
    async def breaks(call: WorkerCall) -> None:
        if call.request.sampling.seed == 2:
            await call.accept()
            await call.tokens(letters("ab"))
            await call.tokens(letters("c"), reason=types_pb2.FINISH_REASON_ERROR)
        else:
            await play(letters("fine"))(call)

    async with stack(breaks) as mesh:
        requests = [inference_pb2.GenerateRequest(text="a", sampling=Sampling(seed=seed)) for seed in range(6)]
        results = await asyncio.gather(*(ask(mesh, request) for request in requests), return_exceptions=True)
    broken = results.pop(2)
    assert isinstance(broken, StatusError)
    assert broken.code is Code.INTERNAL
    assert all(not isinstance(events, BaseException) and text_of(events) == "fine" for events in results)


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_b40_a_cancelled_call_ends_the_work_in_every_state(where: str) -> None:
    async with stack(stall(letters("a") if where == "decode" else ())) as mesh:
        if where == "queue":
            mesh.scheduler.gate.clear()
        call = mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata())
        if where == "queue":
            await mesh.scheduler.places.until_length(1)
        else:
            await call.read()
            await call.read() if where == "decode" else None
        call.cancel()
        if where == "queue":
            await mesh.scheduler.withdrawn.until_length(1)
        else:
            await mesh.workers[0].cancelled.until_length(1)
            (finish,) = await mesh.scheduler.finishes.until_length(1)
            assert finish.finish_reason == types_pb2.FINISH_REASON_CANCELLED
        assert mesh.workers[0].num_open == 0


@pytest.mark.parametrize("where", ["queue", "decode"])
async def test_f17_the_call_s_deadline_is_the_request_s(where: str) -> None:
    async with stack(stall(letters("a"))) as mesh:
        if where == "queue":
            mesh.scheduler.gate.clear()
        with pytest.raises(StatusError) as failure:
            await ask(mesh, inference_pb2.GenerateRequest(text="a"), timeout=0.3)
        assert failure.value.code is Code.DEADLINE_EXCEEDED
        await (mesh.scheduler.withdrawn if where == "queue" else mesh.workers[0].cancelled).until_length(1)
        assert 0 < mesh.scheduler.places[0].ticket.deadline_seconds <= 0.3


async def test_f15_a_reader_that_stops_is_given_up_alone() -> None:
    async def floods(call: WorkerCall) -> None:
        await call.accept()
        while call.request.sampling.seed:
            await call.tokens(letters("x" * 2000))
        await play(letters("fine"))(call)

    async with stack(floods, slow_reader_seconds=0.5) as mesh:
        stuck = mesh.inference.Generate(inference_pb2.GenerateRequest(text="a", sampling=Sampling(seed=1)), metadata=metadata())
        await stuck.read()
        events = await ask(mesh, inference_pb2.GenerateRequest(text="a", sampling=Sampling(seed=0)))
        assert text_of(events) == "fine"
        await mesh.workers[0].cancelled.until_length(1)
        finishes = await mesh.scheduler.finishes.until_length(2)
        assert {finish.finish_reason for finish in finishes} == {LENGTH, types_pb2.FINISH_REASON_CANCELLED}
        # What nobody reads piles up nowhere: two windows of 256 KiB, at a byte per token, and the worker was held back.
        assert sum(mesh.workers[0].calls[0].num_sent.values()) < 1_000_000


async def test_x03_the_org_comes_from_the_token_alone() -> None:
    async with stack(play(letters("x"))) as mesh:
        forged = [
            ("x-org", "victim"),
            ("owner", "victim"),
            ("x-forebay-org", "victim"),
            ("x-tenant-id", "victim"),
            ("x-forwarded-user", "victim"),
        ]
        call = mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=[*forged, *metadata(make_token("acme"))])
        while await call.read() is not grpc.aio.EOF:
            pass
        assert mesh.scheduler.places[0].ticket.org == "acme"
        assert mesh.workers[0].calls[0].request.org == "acme"
        twice = [*metadata(make_token("acme")), *metadata(make_token("victim"))]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=twice).read()
        assert failure.value.code() is Code.UNAUTHENTICATED
        assert len(mesh.scheduler.places) == 1


async def test_x03_headers_cannot_forge_an_org() -> None:
    names = [
        "x-org",
        "x-org-id",
        "x-forebay-org",
        "x-forebay-owner",
        "owner",
        "org",
        "openai-organization",
        "openai-project",
        "x-tenant",
        "x-tenant-id",
    ]
    names += [
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-user",
        "x-forwarded-email",
        "forwarded",
        "x-real-ip",
        "x-original-url",
        "x-user",
    ]
    names += [
        "x-authenticated-user",
        "x-remote-user",
        "remote-user",
        "x-auth-request-user",
        "x-consumer-id",
        "x-api-key",
        "x-goog-user",
        "cookie",
    ]
    async with stack(play(letters("x"))) as mesh:
        for name in names:
            for body in ({"prompt": "a"}, {"prompt": "a", "user": "victim", "org": "victim", "owner": "victim"}):
                answer = await mesh.http.post("/v1/completions", json=body, headers={name: "victim"})
                assert answer.status_code == 200
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a"}, headers={"host": "victim.internal"})
        assert answer.status_code == 200
        assert len(mesh.scheduler.places) == 2 * len(names) + 1 > 50
        assert {place.ticket.org for place in mesh.scheduler.places} == {"acme"}
        twice = [("authorization", make_token("acme")), ("authorization", make_token("victim"))]
        fresh = [(name, value) for name, value in mesh.http.headers.multi_items() if name != "authorization"]
        mesh.http.headers = fresh  # type: ignore[assignment]
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a"}, headers=twice)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert (await mesh.http.post("/v1/completions", json={"prompt": "a"})).status_code == 401


async def test_without_a_valid_token_nothing_but_health_answers() -> None:
    async with stack(play([])) as mesh:
        for token in ("Bearer nonsense", "Bearer a.b.c", "Basic abc", make_token(exp=1)):
            for method, request in [
                (mesh.inference.ListModels, inference_pb2.ListModelsRequest()),
                (mesh.inference.CountTokens, inference_pb2.CountTokensRequest(text="a")),
                (mesh.admin.GetFleet, admin_pb2.GetFleetRequest()),
            ]:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await method(request, metadata=metadata(token))
                assert failure.value.code() is Code.UNAUTHENTICATED
            for path in ("/v1/models", "/v1/models/tiny"):
                assert (await mesh.http.get(path, headers={"authorization": token})).status_code == 401
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
                assert (await mesh.http.post(path, content=b"not even JSON", headers={"authorization": token})).status_code == 401
        assert (await mesh.http.get("/health", headers={"authorization": ""})).status_code == 200


async def test_the_fleet_is_for_operators() -> None:
    async with stack(play([])) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await mesh.admin.GetFleet(admin_pb2.GetFleetRequest(), metadata=metadata())
        assert failure.value.code() is Code.PERMISSION_DENIED
        fleet = await mesh.admin.GetFleet(admin_pb2.GetFleetRequest(), metadata=metadata(make_token("acme", "user", "operator")))
        assert [worker.registration.worker_id for worker in fleet.workers] == ["w0"]
        await mesh.scheduler.stop()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await mesh.admin.GetFleet(admin_pb2.GetFleetRequest(), metadata=metadata(make_token("acme", "operator")))
        assert failure.value.code() is Code.UNAVAILABLE


async def test_inference_is_for_users() -> None:
    async with stack(play([])) as mesh:
        token = make_token("acme", "operator")
        for method, request in [
            (mesh.inference.ListModels, inference_pb2.ListModelsRequest()),
            (mesh.inference.CountTokens, inference_pb2.CountTokensRequest(text="a")),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await method(request, metadata=metadata(token))
            assert failure.value.code() is Code.PERMISSION_DENIED
        for answer in (
            await mesh.http.get("/v1/models", headers={"authorization": token}),
            await mesh.http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": token}),
        ):
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")


async def test_prompt_logprobs_come_in_pieces_before_the_output() -> None:
    async with stack(play(letters("x"))) as mesh:
        sampling = Sampling(prompt_logprobs=1, logprobs=0, max_tokens=1)
        events = await ask(mesh, inference_pb2.GenerateRequest(text="abcdefghij", echo=True, sampling=sampling))
    deltas = [event for event in events if isinstance(event, inference_pb2.Delta)]
    assert deltas[0].text == "abcdefghij"
    pieces = [delta for delta in deltas if delta.prompt_logprobs]
    assert len(pieces) == 3
    assert "".join(entry.chosen.text for piece in pieces for entry in piece.prompt_logprobs) == "abcdefghij"
    assert deltas[-1].logprobs[0].chosen.text_bytes == b"x"
    assert deltas.index(pieces[-1]) < len(deltas) - 1


async def test_length_limits_the_answer_to_the_room_in_the_context() -> None:
    async with stack(play(letters("y" * 10))) as mesh:
        room_for_one = "x" * (MAX_MODEL_LEN - 1)
        events = await ask(mesh, inference_pb2.GenerateRequest(text=room_for_one))
        assert events[-1].usage.completion_tokens == 1
        assert list(events[-1].reasons) == [LENGTH]
        for text in (room_for_one + "x", room_for_one + "xx", room_for_one * 10):
            with pytest.raises(StatusError) as failure:
                await ask(mesh, inference_pb2.GenerateRequest(text=text))
            assert failure.value.code is Code.INVALID_ARGUMENT
