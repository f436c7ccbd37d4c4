"""The generated stubs against a real mesh."""

from collections.abc import Iterator

import grpc
import pytest

from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.mesh import Mesh


@pytest.fixture
def stub(mesh: Mesh) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with mesh.channel() as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def test_generate_from_text_and_from_its_tokens(mesh: Mesh, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    text = "The capital of France is"
    counted = stub.CountTokens(inference_pb2.CountTokensRequest(model=mesh.model, text=text), metadata=mesh.metadata)
    assert counted.num_tokens == len(counted.token_ids) > 0
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=8)
    tokens = types_pb2.TokenIds(ids=counted.token_ids)
    requests = [
        inference_pb2.GenerateRequest(model=mesh.model, text=text, sampling=sampling),
        inference_pb2.GenerateRequest(model=mesh.model, tokens=tokens, sampling=sampling),
    ]
    answers = [list(stub.Generate(request, metadata=mesh.metadata)) for request in requests]
    for events in answers:
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"delta"}
    texts = ["".join(event.delta.text for event in events) for events in answers]
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]


def test_chat_reports_usage_and_echoes_the_label(mesh: Mesh, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    request = inference_pb2.ChatRequest(label="mine", sampling=types_pb2.SamplingParams(temperature=0, max_tokens=12))
    request.messages.add(role="user", content="Name the capital of France.")
    events = list(stub.Chat(request, metadata=mesh.metadata))
    assert events[0].started.label == "mine"
    assert events[0].started.system_fingerprint
    tokens = [token for event in events for token in event.delta.token_ids]
    assert events[-1].finished.usage.completion_tokens == len(tokens)
    assert events[-1].finished.usage.prompt_tokens == events[0].started.prompt_tokens


def test_a_second_ask_hits_the_prefix_cache(mesh: Mesh, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    text = "A story about a lighthouse keeper who counts ships. " * 12
    request = inference_pb2.GenerateRequest(text=text, sampling=types_pb2.SamplingParams(temperature=0, max_tokens=4))
    first, second = (list(stub.Generate(request, metadata=mesh.metadata)) for _ in range(2))
    assert second[-1].finished.usage.cached_tokens > 0
    assert "".join(e.delta.text for e in first) == "".join(e.delta.text for e in second)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": "no-such-model"}, grpc.StatusCode.NOT_FOUND),
        ({"sampling": types_pb2.SamplingParams(temperature=-1)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_refusals(mesh: Mesh, stub: inference_pb2_grpc.InferenceServiceStub, change: dict[str, object], code: grpc.StatusCode) -> None:
    request = inference_pb2.GenerateRequest(**{"model": mesh.model, "text": "x", **change})  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, metadata=mesh.metadata))
    assert caught.value.code() is code


def test_no_token_no_answer(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ListModels(inference_pb2.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_deadline_ends_the_call_and_frees_its_blocks(mesh: Mesh, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    sampling = types_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(inference_pb2.GenerateRequest(text="Go on", sampling=sampling), metadata=mesh.metadata, timeout=1))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    mesh.wait_until_idle()


def test_a_cancelled_call_frees_its_blocks(mesh: Mesh, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    sampling = types_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    call = stub.Generate(inference_pb2.GenerateRequest(text="Go on", sampling=sampling), metadata=mesh.metadata)
    assert next(call).WhichOneof("event") == "started"
    call.cancel()
    mesh.wait_until_idle()
