"""The real openai SDK, sync and async, against the gateway in this process."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import openai
import pytest

from forebay.v1 import types_pb2
from services.common.errors import Code, StatusError, unavailable
from tests.fakes import STOP, WorkerCall, play, stall
from tests.unit.gateway.build import EOS, Stack, letters, stack

Result = TypeVar("Result")
MESSAGES: Any = [{"role": "user", "content": "the capital of France?"}]
PARIS = play([*letters("Paris."), EOS], reason=STOP)


def client(mesh: Stack, **fields: Any) -> openai.AsyncOpenAI:
    key = mesh.token().removeprefix("Bearer ")
    return openai.AsyncOpenAI(base_url=f"http://{mesh.http_address}/v1", api_key=key, **{"max_retries": 0} | fields)


async def synchronously(mesh: Stack, work: Callable[[openai.OpenAI], Result]) -> Result:
    def run() -> Result:
        key = mesh.token().removeprefix("Bearer ")
        with openai.OpenAI(base_url=f"http://{mesh.http_address}/v1", api_key=key, max_retries=0) as sdk:
            return work(sdk)

    return await asyncio.to_thread(run)


async def test_async_chat_whole_and_streamed() -> None:
    async with stack(PARIS) as mesh, client(mesh) as sdk:
        whole = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=1)
        stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert [choice.message.content for choice in whole.choices] == ["Paris.", "Paris."]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == 7
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


async def test_sync_chat_and_completions() -> None:
    def work(sdk: openai.OpenAI) -> tuple[Any, ...]:
        chat = sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=4, stop=["zz"], seed=1, user="u1")
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        )  # fmt: skip
        legacy = sdk.completions.create(model="tiny", prompt=["a", "b"], echo=True, logprobs=2, max_tokens=3)
        pieces = "".join(chunk.choices[0].text for chunk in sdk.completions.create(model="tiny", prompt="a", stream=True))
        return chat, streamed, legacy, pieces, [model.id for model in sdk.models.list()], sdk.models.retrieve("small").id

    async with stack(PARIS) as mesh:
        chat, streamed, legacy, pieces, models, model = await synchronously(mesh, work)
    assert chat.choices[0].message.content == "Pari"
    assert chat.choices[0].finish_reason == "length"
    assert streamed == pieces == "Paris."
    assert [choice.text for choice in legacy.choices] == ["aPar", "bPar"]
    assert legacy.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert (models, model) == (["tiny"], "tiny")


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (StatusError(Code.RESOURCE_EXHAUSTED, "over the quota"), openai.RateLimitError),
        (unavailable("no worker"), openai.InternalServerError),
        (StatusError(Code.INTERNAL, "broken"), openai.InternalServerError),
        (StatusError(Code.PERMISSION_DENIED, "not yours"), openai.PermissionDeniedError),
    ],
)
async def test_errors_are_the_sdk_s_own_kinds(refusal: StatusError, kind: type[openai.APIStatusError]) -> None:
    async with stack(PARIS) as mesh, client(mesh) as sdk:
        mesh.scheduler.refusals.append(refusal)
        with pytest.raises(kind) as failure:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert refusal.message in str(failure.value)
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="none", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await sdk.with_options(api_key="wrong").models.list()


async def test_the_sdk_retries_what_may_be_retried_and_no_deadline() -> None:
    async with stack(PARIS) as mesh, client(mesh, max_retries=2) as sdk:
        mesh.scheduler.refusals.append(unavailable("busy", 0.01))
        answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.choices[0].message.content == "Paris."
        assert len(mesh.scheduler.places) == 2
        mesh.scheduler.refusals.append(StatusError(Code.DEADLINE_EXCEEDED, "too late"))
        with pytest.raises(openai.InternalServerError):
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert len(mesh.scheduler.places) == 3


async def test_the_sdk_waits_out_a_quota_and_gives_up_what_never_fits() -> None:
    async with stack(PARIS) as mesh, client(mesh, max_retries=2) as sdk:
        mesh.scheduler.terms["quota"] = types_pb2.QuotaState(tokens_limit=9, tokens_remaining=4, tokens_reset_seconds=1.2)
        mesh.scheduler.refusals.append(
            StatusError(Code.RESOURCE_EXHAUSTED, "over the quota", reason="QUOTA_EXCEEDED", retry_after_seconds=0.01)
        )
        raw = await sdk.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
        assert raw.parse().choices[0].message.content == "Paris."
        assert (raw.headers["x-ratelimit-remaining-tokens"], raw.headers["x-ratelimit-reset-tokens"]) == ("4", "1.2s")
        assert len(mesh.scheduler.places) == 2
        mesh.scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "this never fits", reason="REQUEST_TOO_LARGE"))
        with pytest.raises(openai.RateLimitError) as failure:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert failure.value.code == "insufficient_quota"
        assert len(mesh.scheduler.places) == 3


async def test_an_error_in_the_stream_raises() -> None:
    async def breaks(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("Par"))
        await call.fail(Code.INTERNAL)

    async with stack(breaks) as mesh, client(mesh) as sdk:
        stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        pieces: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")  # noqa: PERF401  # what came before the error counts

        with pytest.raises(openai.APIError, match="the engine failed"):
            await read()
        assert "".join(pieces) == "Par"


async def test_closing_the_stream_ends_the_work() -> None:
    async with stack(stall(letters("a"))) as mesh, client(mesh) as sdk:
        stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "a":
                break
        await stream.close()
        await mesh.workers[0].cancelled.until_length(1)
        await mesh.scheduler.finishes.until_length(1)


async def test_our_own_fields_pass_through_extra_body_and_headers() -> None:
    async with stack(PARIS) as mesh, client(mesh) as sdk:
        raw = await sdk.chat.completions.with_raw_response.create(
            model="tiny",
            messages=MESSAGES,
            service_tier="flex",
            extra_body={"top_k": 5, "min_p": 0.1, "unheard_of": 1},
            extra_headers={"x-request-id": "mine"},
        )
        assert raw.headers["x-forebay-class"] == "batch"
        assert raw.headers["x-forebay-ignored"] == "unheard_of"
        assert raw.parse()._request_id == "mine"
        assert mesh.workers[0].calls[0].request.sampling.top_k == 5
