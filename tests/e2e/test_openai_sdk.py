"""The real openai SDK against a real mesh."""

import asyncio

import httpx
import openai
import pytest

from tests.e2e.mesh import Mesh, sdk

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


def test_chat(mesh: Mesh) -> None:
    answer = mesh.openai().chat.completions.create(model=mesh.model, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model
    assert answer.system_fingerprint


def test_a_stream_says_what_the_whole_answer_says(mesh: Mesh) -> None:
    client = mesh.openai()
    asked = {"model": mesh.model, "messages": QUESTION, "temperature": 0.8, "seed": 11, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def test_async(mesh: Mesh) -> None:
    async with mesh.async_openai() as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(model=mesh.model, messages=QUESTION, temperature=0, max_tokens=16) for _ in range(3))
        )
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await client.chat.completions.create(model=mesh.model, messages=QUESTION, temperature=0, max_tokens=16, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answers[0].choices[0].message.content


def test_completion_with_logprobs_echo_and_a_stop(mesh: Mesh) -> None:
    answer = mesh.openai().completions.create(
        model=mesh.model, prompt="One, two, three, four,", temperature=0, max_tokens=16, logprobs=2, echo=True, stop=[" seven"]
    )
    choice = answer.choices[0]
    assert choice.text.startswith("One, two, three, four,")
    assert " seven" not in choice.text
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens or []) == answer.usage.total_tokens
    assert (choice.logprobs.token_logprobs or [])[0] is None


def test_n_choices_differ_and_repeat_with_their_seed(mesh: Mesh) -> None:
    asked = {"model": mesh.model, "prompt": "A list of colours:", "temperature": 1.5, "seed": 3, "n": 3, "max_tokens": 12}
    first, second = (mesh.openai().completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]


def test_models(mesh: Mesh) -> None:
    _, model = mesh.openai().models.list().data  # the one that embeds is before it
    assert model.id == mesh.model
    assert (model.model_extra or {})["max_model_len"] > 0


def test_errors_have_the_sdks_classes(mesh: Mesh) -> None:
    client = mesh.openai()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=mesh.model, messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        sdk(mesh, "nobody").models.list()


def test_a_dropped_stream_frees_its_blocks(mesh: Mesh) -> None:
    stream = mesh.openai().completions.create(
        model=mesh.model, prompt="Once upon a time", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    mesh.wait_until_idle()


def test_health_needs_no_token(mesh: Mesh) -> None:
    root = mesh.http_base_url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").status_code == 200
    assert httpx.get(f"{root}/ready").status_code == 200
    assert httpx.get(f"{root}/v1/models").status_code == 401
