"""What an org was promised, as its clients see it at both faces: classes, quotas, models; and the schedulers that say so."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import Code, StatusError, from_rpc, unavailable
from services.gateway.answers import Keeping
from services.gateway.latency import BATCH, REALTIME, STANDARD, UNSPECIFIED
from services.policy.catalogue import PublicModel, Target
from tests.fakes import WorkerCall, play
from tests.unit.gateway.build import events_of, letters, make_token, stack
from tests.unit.gateway.test_server import ask, metadata

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
ENDPOINTS = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
QUOTA = types_pb2.QuotaState(
    requests_limit=60, requests_remaining=59, requests_reset_seconds=1, tokens_limit=9000, tokens_remaining=8000, tokens_reset_seconds=360
)
HEADERS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-limit-tokens": "9000",
    "x-ratelimit-remaining-tokens": "8000",
    "x-ratelimit-reset-tokens": "6m0s",
}


def over_quota(kind: str = "tokens") -> StatusError:
    failure = error_details_pb2.QuotaFailure()
    failure.violations.add(subject="org:acme", description=f"{kind}: too many")
    state = types_pb2.QuotaState(tokens_limit=100, tokens_remaining=3, tokens_reset_seconds=30)
    words = "acme has reached its limit of 100 tokens per minute: try again in 1.25 s"
    return StatusError(Code.RESOURCE_EXHAUSTED, words, reason="QUOTA_EXCEEDED", retry_after_seconds=1.25, details=[failure, state])


async def test_a_class_above_the_ceiling_is_lowered_and_the_answer_says_so() -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.policies["acme"] = types_pb2.OrgPolicy(org="acme", ceiling_class=BATCH)
        for path, body in ENDPOINTS:
            answer = await mesh.http.post(path, json=body | {"service_tier": "priority"})
            assert (answer.headers["x-forebay-class"], answer.headers["x-forebay-class-lowered-from"]) == ("batch", "realtime")
            assert answer.json()["service_tier"] == "flex"
            head = (await events_of(mesh, path, body, **{"x-forebay-class": "standard"}))[0]
            assert head["service_tier"] == "flex"
            plain = await mesh.http.post(path, json=body)
            assert plain.headers["x-forebay-class"] == "batch"
            assert "x-forebay-class-lowered-from" not in plain.headers
        started, *_ = await ask(mesh, inference_pb2.GenerateRequest(text="a", latency_class=REALTIME))
        assert (started.latency_class, started.lowered_from) == (BATCH, REALTIME)
        started, *_ = await ask(mesh, inference_pb2.GenerateRequest(text="a"))
        assert (started.latency_class, started.lowered_from) == (BATCH, UNSPECIFIED)
        assert {place.ticket.latency_class for place in mesh.scheduler.places} == {BATCH}
        assert {call.request.latency_class for call in mesh.workers[0].calls} == {BATCH}


@pytest.mark.parametrize(
    ("ceiling", "body", "granted"),
    [
        (REALTIME, {}, "batch"),
        (REALTIME, {"service_tier": "auto"}, "batch"),
        (REALTIME, {"tools": TOOLS}, "realtime"),
        (REALTIME, {"tools": TOOLS, "service_tier": "auto"}, "realtime"),
        (REALTIME, {"tools": TOOLS, "tool_choice": "none"}, "batch"),
        (REALTIME, {"tools": TOOLS, "service_tier": "default"}, "standard"),
        (STANDARD, {"tools": TOOLS}, "batch"),
    ],
)
async def test_a_request_that_names_no_class_gets_its_org_s(
    ceiling: types_pb2.LatencyClass.ValueType, body: dict[str, Any], granted: str
) -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.policies["acme"] = types_pb2.OrgPolicy(org="acme", default_class=BATCH, ceiling_class=ceiling)
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT | body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-forebay-class"] == granted
        assert "x-forebay-class-lowered-from" not in answer.headers


async def test_quota_headers_on_success_whole_and_streamed() -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.terms["quota"] = QUOTA
        for path, body in ENDPOINTS:
            for streamed in (False, True):
                answer = await mesh.http.post(path, json=body | {"stream": streamed})
                assert answer.status_code == 200
                assert HEADERS.items() <= answer.headers.items()
        mesh.scheduler.terms.clear()
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a"})
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(("kind", "type_"), [("tokens", "tokens"), ("requests", "requests"), ("concurrent", "requests")])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_says_what_ran_out_and_when_to_come_back(kind: str, type_: str, streamed: bool) -> None:
    async with stack(play(letters("x"))) as mesh:
        for path, body in ENDPOINTS:
            mesh.scheduler.refusals.append(over_quota(kind))
            answer = await mesh.http.post(path, json=body | {"stream": streamed})
            assert answer.status_code == 429
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == (type_, "rate_limit_exceeded")
            assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1250")
            assert answer.headers["x-ratelimit-remaining-tokens"] == "3"
            assert answer.headers["x-ratelimit-reset-tokens"] == "30s"
            assert "x-should-retry" not in answer.headers
        assert not mesh.scheduler.finishes


async def test_a_refusal_behind_a_lease_tells_its_own_state() -> None:
    async def no_room(call: WorkerCall) -> None:
        mesh.scheduler.refusals.append(over_quota())
        await call.fail(Code.RESOURCE_EXHAUSTED)

    async with stack(no_room) as mesh:
        mesh.scheduler.terms["quota"] = QUOTA
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 429
        assert (answer.headers["x-ratelimit-remaining-tokens"], answer.headers["x-ratelimit-limit-tokens"]) == ("3", "100")


async def test_what_can_never_fit_is_not_to_be_tried_again() -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "this never fits", reason="REQUEST_TOO_LARGE"))
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 429
        assert answer.json()["error"] | {"message": ""} == {
            "message": "", "type": "insufficient_quota", "param": None, "code": "insufficient_quota",
        }  # fmt: skip
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers


async def test_grpc_clients_get_the_details_as_the_scheduler_gave_them() -> None:
    async with stack(play(letters("x"))) as mesh:
        refusal = over_quota()
        mesh.scheduler.refusals.append(refusal)
        with pytest.raises(StatusError) as caught:
            await ask(mesh, inference_pb2.GenerateRequest(text="a"))
        error = caught.value
        assert (error.code, error.reason, error.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 1.25)
        assert error.details == refusal.details


async def test_targets_of_the_class_go_on_to_the_worker_with_the_time_already_waited() -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.terms |= {"ttft_target_seconds": 0.2, "tpot_target_seconds": 0.05}
        mesh.scheduler.gate.clear()
        task = asyncio.create_task(ask(mesh, inference_pb2.GenerateRequest(text="a")))
        await mesh.scheduler.places.until_length(1)
        queued_at = mesh.gateway.mesh.clock()
        while mesh.gateway.mesh.clock() <= queued_at:
            pass
        passed = mesh.gateway.mesh.clock() - queued_at
        mesh.scheduler.gate.set()
        await task
        request = mesh.workers[0].calls[0].request
        assert (request.ttft_target_seconds, request.tpot_target_seconds) == (0.2, 0.05)
        assert request.waited_seconds > passed


@pytest.mark.parametrize("where", ["queue", "before accepted", "prefill", "decode"])
async def test_a_cancelled_stream_settles_to_what_was_delivered(where: str) -> None:
    async def script(call: WorkerCall) -> None:
        if where != "before accepted":
            await call.accept()
        if where == "decode":
            await call.tokens(letters("ab"))
        await asyncio.Event().wait()

    async with stack(script) as mesh:
        if where == "queue":
            mesh.scheduler.gate.clear()
        call = mesh.inference.Generate(inference_pb2.GenerateRequest(text="abc"), metadata=metadata())
        if where == "queue":
            await mesh.scheduler.places.until_length(1)
        elif where == "before accepted":
            await mesh.workers[0].calls.until_length(1)
        else:
            for _ in range(2 if where == "decode" else 1):
                await call.read()
        call.cancel()
        (finish,) = await mesh.scheduler.finishes.until_length(1)
        used = {"prefill": (3, 0), "decode": (3, 2)}.get(where, (0, 0))
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == used
        assert finish.status_code == Code.CANCELLED.value[0]


async def test_models_of_other_orgs_are_not_there_at_either_face() -> None:
    public = {"chat": PublicModel("chat", (Target("tiny"),), aliases=("gpt-4o",), orgs=("acme",))}
    async with stack(play(letters("x")), public=public) as mesh:
        assert [model["id"] for model in (await mesh.http.get("/v1/models")).json()["data"]] == ["chat"]
        answer = await mesh.http.post("/v1/completions", json={"prompt": "a", "model": "gpt-4o"})
        assert answer.json()["model"] == "tiny", "the one that ran"
        assert (await mesh.http.get("/v1/models/gpt-4o")).json()["aliases"] == ["gpt-4o"]
        stranger = {"authorization": make_token("stranger")}
        assert (await mesh.http.get("/v1/models", headers=stranger)).json()["data"] == []
        for name in ("chat", "gpt-4o", "tiny", "chat@fp32", "tiny@fp32", "made-up"):
            assert (await mesh.http.get(f"/v1/models/{name}", headers=stranger)).status_code == 404
            for path, body in (*ENDPOINTS, ("/tokenize", {"prompt": "a"})):
                refused = await mesh.http.post(path, json=body | {"model": name}, headers=stranger)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            with pytest.raises(StatusError) as caught:
                await ask(mesh, inference_pb2.GenerateRequest(text="a", model=name), token=make_token("stranger"))
            assert caught.value.code is Code.NOT_FOUND
        listed = await mesh.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata(make_token("stranger")))
        assert not listed.models
        assert len(mesh.scheduler.places) == 1


async def test_a_policy_is_asked_for_once_in_a_while_and_outlives_its_schedulers() -> None:
    async with stack(play(letters("x")), keeping=Keeping(good_seconds=0)) as mesh:
        mesh.scheduler.policies["acme"] = types_pb2.OrgPolicy(org="acme", ceiling_class=BATCH)
        assert (await mesh.http.post("/v1/completions", json={"prompt": "a"})).headers["x-forebay-class"] == "batch"
        mesh.scheduler.away = unavailable("Redis is away", reason="STORE_UNAVAILABLE")
        for _ in range(5):
            assert (await mesh.http.post("/v1/completions", json={"prompt": "a"})).headers["x-forebay-class"] == "batch"
        assert len(mesh.scheduler.org_questions) == 2
        stranger = await mesh.http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": make_token("new")})
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (503, "store_unavailable")
    async with stack(play(letters("x"))) as mesh:
        await asyncio.gather(*(mesh.http.get("/v1/models") for _ in range(20)))
        assert mesh.scheduler.org_questions == ["acme"]


async def test_x06_a_token_that_expires_ends_no_stream_and_starts_none() -> None:
    """The policy: who was let in may finish. The authenticator's clock is moved past the token's end mid-stream."""
    gate = asyncio.Event()

    async def slow(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("be"))
        await gate.wait()
        await call.tokens(letters("gun"), reason=types_pb2.FINISH_REASON_STOP, grammar_complete=True)
        await call.complete()

    async with stack(slow) as mesh:
        token, now = make_token(), mesh.gateway.authenticator._clock()
        call = mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata(token))
        events = aiter(call)
        await anext(events)
        mesh.gateway.authenticator._clock = lambda: now + 10_000
        with pytest.raises(StatusError) as caught:
            await ask(mesh, inference_pb2.GenerateRequest(text="a"), token=token)
        assert caught.value.code is Code.UNAUTHENTICATED
        assert (await mesh.http.get("/v1/models", headers={"authorization": token})).status_code == 401
        gate.set()
        text = "".join([event.delta.text async for event in events])
        assert text == "begun"


async def test_x03_metadata_cannot_forge_an_org() -> None:
    names = [f"{prefix}{name}" for prefix in ("", "x-", "x-forebay-", "x-forwarded-", "grpc-") for name in _ORG_NAMES]
    assert len(names) >= 50
    async with stack(play(letters("x"))) as mesh:
        for name in names:
            forged = [(name, "victim"), (name, "victim"), *metadata(make_token("acme"))]
            if name.startswith("grpc-"):  # reserved: gRPC itself drops or refuses them
                forged = [(f"{name}-bin", b"victim"), *metadata(make_token("acme"))]
            events = [event async for event in mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=forged)]
            assert events
        assert {place.ticket.org for place in mesh.scheduler.places} == {"acme"}
        assert {call.request.org for call in mesh.workers[0].calls} == {"acme"}
        assert set(mesh.scheduler.org_questions) == {"acme"}


_ORG_NAMES = ("org", "org-id", "owner", "tenant", "tenant-id", "user", "host", "api-key", "authorization-org", "real-ip", "account")


async def test_while_no_scheduler_can_tell_of_an_org_it_is_said_so() -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.away = unavailable("Redis is away", reason="STORE_UNAVAILABLE")
        with pytest.raises(grpc.aio.AioRpcError, match="Redis is away") as caught:
            await mesh.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata(make_token("new")))
        assert from_rpc(caught.value).reason == "STORE_UNAVAILABLE"


async def test_a_default_fits_the_share_of_the_cache_and_what_is_asked_for_goes_to_the_scheduler() -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.policies["acme"] = types_pb2.OrgPolicy(org="acme", kv_share=0.01)  # 10 blocks of 16
        for fields in ({}, {"n": 3}, {"max_tokens": 200}):
            assert (await mesh.http.post("/v1/completions", json={"prompt": "abc"} | fields)).status_code == 200
        assert [place.ticket.max_tokens for place in mesh.scheduler.places] == [157, 157, 200]
