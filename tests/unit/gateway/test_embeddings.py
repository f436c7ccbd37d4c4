"""Vectors through both faces: every form of input, formats, dimensions, what is refused by name, and the real openai SDK."""

import base64
import struct
from typing import Any

import grpc
import openai
import pytest

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.gateway.embed_request import MAX_INPUT_BYTES, MAX_INPUTS
from tests.fake_embedder import DIMENSIONS, MAX_INPUT_LEN, EmbedCall, FakeEmbedder, embed_nothing, vector
from tests.unit.gateway.build import VOCAB_SIZE, Stack, letters, make_model, stack

MODEL: dict[str, Any] = {"template": None, "compiler": None, "dimensions": DIMENSIONS, "max_model_len": MAX_INPUT_LEN}
CHAT = make_model(name="chat", aliases=())


async def post(mesh: Stack, body: dict[str, Any], status: int = 200, **headers: str) -> Any:
    answer = await mesh.http.post("/v1/embeddings", json={"model": "tiny"} | body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def vectors_of(answer: Any) -> list[list[float]]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    return [entry["embedding"] for entry in answer["data"]]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("abc", [letters("abc")]),
        (["ab", "c", "ddd"], [letters("ab"), letters("c"), letters("ddd")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_every_form_of_input_gets_its_vectors_in_order(given: Any, inputs: list[list[int]]) -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        answer = await post(mesh, {"input": given})
    num_tokens = sum(map(len, inputs))
    assert vectors_of(answer) == [vector(ids) for ids in inputs]
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_base64_is_the_same_vectors() -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        answer = await post(mesh, {"input": ["ab", "c"], "encoding_format": "base64"})
    decoded = [list(struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(text))) for text in vectors_of(answer)]
    assert decoded == [vector(letters("ab")), vector(letters("c"))]


async def test_dimensions_are_the_workers_to_cut() -> None:
    async with stack(worker := FakeEmbedder(), **MODEL) as mesh:
        assert vectors_of(await post(mesh, {"input": "abc", "dimensions": 2})) == [vector(letters("abc"), 2)]
        assert vectors_of(await post(mesh, {"input": "abc", "dimensions": DIMENSIONS})) == [vector(letters("abc"))]
    assert [call.request.dimensions for call in worker.embed_calls] == [2, 0]


async def test_as_many_inputs_as_openai_takes_in_one_call() -> None:
    async with stack(worker := FakeEmbedder(), **MODEL) as mesh:
        answer = await post(mesh, {"input": [[index % VOCAB_SIZE] for index in range(MAX_INPUTS)]})
    assert vectors_of(answer) == [vector([index % VOCAB_SIZE]) for index in range(MAX_INPUTS)]
    assert len(worker.embed_calls) == len(mesh.scheduler.places) == 1


async def test_a_call_is_one_ticket_and_settled_by_its_tokens() -> None:
    async with stack(worker := FakeEmbedder(), **MODEL) as mesh:
        await post(mesh, {"input": ["abc", "de"]})
        (finish,) = await mesh.scheduler.finishes.until_length(1)
    ticket, (call,) = mesh.scheduler.places[0].ticket, worker.embed_calls
    assert (ticket.num_prompt_tokens, ticket.max_tokens, ticket.n, list(ticket.block_hashes)) == (5, 0, 1, [])
    assert ticket.latency_class == types_pb2.LATENCY_CLASS_STANDARD
    assert (call.request.org, call.request.model, call.request.epoch) == ("acme", "tiny@fp32", 1)
    assert call.request.latency_class == types_pb2.LATENCY_CLASS_STANDARD
    assert (finish.status_code, finish.epoch, finish.finish_reason) == (0, 1, types_pb2.FINISH_REASON_STOP)
    assert finish.usage == types_pb2.Usage(prompt_tokens=5)
    assert finish.explanation.usage.prompt_tokens == 5


async def test_class_deadline_and_ids_are_as_a_generations() -> None:
    async with stack(worker := FakeEmbedder(), **MODEL) as mesh:
        answer = await mesh.http.post(
            "/v1/embeddings",
            json={"model": "tiny", "input": "abc", "service_tier": "flex"},
            headers={"x-forebay-deadline": "7", "x-request-id": "mine"},
        )
    ticket = mesh.scheduler.places[0].ticket
    assert ticket.latency_class == worker.embed_calls[0].request.latency_class == types_pb2.LATENCY_CLASS_BATCH
    assert ticket.deadline_seconds == 7
    assert answer.headers["x-forebay-request-id"] == ticket.request_id
    assert answer.headers["x-forebay-class"] == "batch"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "input", "input is missing"),
    "null": ({"input": None}, "input", "input is missing"),
    "empty list": ({"input": []}, "input", "must hold a text or token ids"),
    "empty text": ({"input": ["a", ""]}, "input[1]", "must have at least one character"),
    "no ids": ({"input": [[1], []]}, "input[1]", "input[1] has no tokens"),
    "mixed": ({"input": ["a", [1]]}, "input[1]", "must be a text"),
    "number": ({"input": 7}, "input", "must be a text, a list of texts"),
    "id": ({"input": [[1, VOCAB_SIZE]]}, "input[0][1]", f"must be from 0 to {VOCAB_SIZE - 1}"),
    "many": ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"has {MAX_INPUTS + 1} entries: it may have at most {MAX_INPUTS}"),
    "large": ({"input": ["a" * (MAX_INPUT_BYTES + 1)]}, "input[0]", f"over {MAX_INPUT_BYTES} bytes of text"),
    "long": ({"input": "a" * 20}, "input", f"input has 20 tokens: the model takes at most {MAX_INPUT_LEN} in one input"),
    "one is long": ({"input": ["a", "b" * 17]}, "input[1]", "shorten it by 1 tokens"),
    "long ids": ({"input": [[1], [2] * 17]}, "input[1]", "input[1] has 17 tokens"),
    "dimensions": ({"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions", f"must be from 1 to {DIMENSIONS}"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions", f"must be from 1 to {DIMENSIONS}"),
    "text dimensions": ({"input": "a", "dimensions": "2"}, "dimensions", "must be an integer"),
    "format": ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64"),
    "stream": ({"input": "a", "stream": True}, "stream", "not a field of this endpoint"),
    "prompt": ({"input": "a", "prompt": "a"}, "prompt", "send input"),
    "unknown": ({"input": "a", "strict": True, "inptu": 1}, "inptu", "not a known field"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_name_and_placed_nowhere(name: str) -> None:
    body, field, words = REFUSED[name]
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        error = (await post(mesh, body, 400))["error"]
    assert error["param"] == field
    assert words in error["message"]
    assert mesh.scheduler.places == []


async def test_a_model_is_asked_for_what_it_does_alone() -> None:
    async with stack(FakeEmbedder(models=("tiny@fp32", "chat@fp32")), others=[CHAT], **MODEL) as mesh:
        wrong = (await post(mesh, {"model": "chat", "input": "a"}, 400))["error"]
        chat = await mesh.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
        legacy = await mesh.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        models = {model["id"]: model["capabilities"] for model in (await mesh.http.get("/v1/models")).json()["data"]}
        described = (
            await mesh.inference.GetModel(inference_pb2.GetModelRequest(name="tiny"), metadata=[("authorization", mesh.token())])
        ).model
        assert vectors_of(await post(mesh, {"model": None, "input": "a"})) == [vector(letters("a"))]  # the only one that embeds
    assert (wrong["param"], wrong["message"]) == (
        "model",
        "the model chat generates text (chat and completions): ask it for that, or name one that turns texts into vectors (embeddings)",
    )
    for answer in (chat, legacy):
        assert answer.status_code == 400
        assert "the model tiny turns texts into vectors (embeddings)" in answer.json()["error"]["message"]
    assert models == {"tiny": ["embed"], "chat": ["generate"]}
    assert (list(described.capabilities), described.dimensions) == (["embed"], DIMENSIONS)


async def test_tokens_of_a_model_that_embeds_can_be_counted() -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        counted = await mesh.http.post("/tokenize", json={"model": "tiny", "prompt": "abc"})
    assert counted.json() == {"count": 3, "max_model_len": MAX_INPUT_LEN, "tokens": letters("abc")}


# -- gRPC


def embed_request(*inputs: str | list[int], **fields: Any) -> inference_pb2.EmbedRequest:
    given = [
        inference_pb2.EmbedInput(text=entry) if isinstance(entry, str) else inference_pb2.EmbedInput(tokens=types_pb2.TokenIds(ids=entry))
        for entry in inputs
    ]
    return inference_pb2.EmbedRequest(model="tiny", inputs=given, **fields)


async def test_grpc_says_started_then_vectors_then_finished() -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        metadata = [("authorization", mesh.token())]
        request = embed_request("ab", "c", "ddd", label="mine", latency_class=types_pb2.LATENCY_CLASS_REALTIME)
        responses = [response async for response in mesh.inference.Embed(request, metadata=metadata)]
    assert [response.WhichOneof("event") for response in responses] == ["started", "embeddings", "embeddings", "finished"]
    started, finished = responses[0].started, responses[-1].finished
    assert (started.model, started.prompt_tokens, started.label, started.seed) == ("tiny@fp32", 6, "mine", 0)
    assert (started.latency_class, started.system_fingerprint) == (types_pb2.LATENCY_CLASS_REALTIME, "fp32-test")
    assert finished.usage == types_pb2.Usage(prompt_tokens=6)
    vectors = {one.index: list(one.values) for response in responses for one in response.embeddings.embeddings}
    assert vectors == {index: vector(letters(text)) for index, text in enumerate(("ab", "c", "ddd"))}


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (embed_request(), "inputs", "must hold a text or token ids"),
        (embed_request("a", [1]), "inputs[1]", "must be a text"),
        (embed_request("a" * 17), "inputs[0]", "inputs[0] has 17 tokens"),
        (embed_request("a", dimensions=0), "dimensions", "must be from 1 to 4"),
        (inference_pb2.EmbedRequest(model="tiny", inputs=[inference_pb2.EmbedInput()]), "inputs[0]", "has no tokens"),
    ],
)
async def test_grpc_refuses_in_the_same_words(request_: inference_pb2.EmbedRequest, field: str, words: str) -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in mesh.inference.Embed(request_, metadata=[("authorization", mesh.token())])]
    error = from_rpc(caught.value)
    assert error.code is Code.INVALID_ARGUMENT
    assert words in error.message
    assert error.violations[0].field == field


async def test_grpc_refuses_a_chat_with_a_model_that_embeds() -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        chat = inference_pb2.ChatRequest(model="tiny", messages=[inference_pb2.ChatMessage(role="user", content="a")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in mesh.inference.Chat(chat, metadata=[("authorization", mesh.token())])]
    assert "turns texts into vectors" in from_rpc(caught.value).message


# -- ends


async def test_a_client_that_leaves_frees_the_worker() -> None:
    async with stack(worker := FakeEmbedder(embed_nothing), **MODEL) as mesh:
        call = mesh.inference.Embed(embed_request("a"), metadata=[("authorization", mesh.token())])
        await call.read()
        call.cancel()
        await worker.cancelled.until_length(1)
        (finish,) = await mesh.scheduler.finishes.until_length(1)
    assert finish.status_code == Code.CANCELLED.value[0]
    assert finish.usage == types_pb2.Usage()


async def test_what_is_over_the_quota_is_told_as_for_any_request() -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        mesh.scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "over it", reason="QUOTA_EXCEEDED", retry_after_seconds=2))
        error = (await post(mesh, {"input": "a"}, 429))["error"]
        assert "over it" in error["message"]
        assert mesh.metric("forebay_org_quota_refused_total", org="acme") == 1


async def test_metrics_count_inputs_and_tokens() -> None:
    labels = {"face": "http", "model": "tiny", "latency_class": "standard"}
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        await post(mesh, {"input": ["abc", "de"]})
        assert mesh.metric("forebay_embedded_inputs_total", **labels) == 2
        assert mesh.metric("forebay_prompt_tokens_total", **labels) == 5
        assert mesh.metric("forebay_requests_total", status="OK", **labels) == 1
        assert mesh.metric("forebay_request_seconds_count", **labels) == 1
        assert mesh.metric("forebay_org_prompt_tokens_total", org="acme") == 5
        assert mesh.metric("forebay_requests_in_flight", face="http") == 0


async def test_an_engines_failure_is_ours() -> None:
    async def fails(call: EmbedCall) -> None:
        await call.accept()
        await call.fail(Code.INTERNAL, "the vector of inputs[0] isn't finite")

    async with stack(FakeEmbedder(fails), **MODEL) as mesh:
        error = (await post(mesh, {"input": "a"}, 500))["error"]
    assert "the engine failed on this request" in error["message"]


async def test_the_openai_sdk() -> None:
    async with stack(FakeEmbedder(), **MODEL) as mesh:
        key = mesh.token().removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=f"http://{mesh.http_address}/v1", api_key=key, max_retries=0) as sdk:
            by_default = await sdk.embeddings.create(model="tiny", input=["ab", "c"])  # asks for base64
            as_floats = await sdk.embeddings.create(model="tiny", input="ab", encoding_format="float", dimensions=3, user="u1")
            by_ids = await sdk.embeddings.create(model="tiny", input=[[1, 2], [3]])
            with pytest.raises(openai.BadRequestError, match="has 17 tokens"):
                await sdk.embeddings.create(model="tiny", input="a" * 17)
    assert [entry.embedding for entry in by_default.data] == [vector(letters("ab")), vector(letters("c"))]
    assert as_floats.data[0].embedding == vector(letters("ab"), 3)
    assert [entry.embedding for entry in by_ids.data] == [vector([1, 2]), vector([3])]
    assert by_ids.usage.total_tokens == 3
