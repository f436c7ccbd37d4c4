"""Idempotency keys on both faces: a key's tries are one request, by whatever gateway they come."""

from dataclasses import replace
from typing import Any

import grpc
import pytest

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import Code, StatusError, from_rpc, unavailable
from services.gateway.auth import Caller
from services.gateway.embed_request import Embedding
from services.gateway.idempotency import MAX_KEY_CHARS, claimed, one_key
from services.gateway.mesh import Mesh
from services.gateway.request import Generation
from services.gateway.text.reply import ReplyForm
from tests.fakes import FakeScheduler, play, serving
from tests.unit.gateway.build import FAST, Stack, events_of, generation, letters, make_model, make_token, stack

SALLY = Caller("acme", "sally", frozenset({"user"}), 2e9)
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEY = {"idempotency-key": "k1"}


@pytest.fixture
async def mesh():
    async with stack(play(letters("ab"))) as running:
        yield running


def _ids(mesh: Stack) -> list[str]:
    return [place.ticket.request_id for place in mesh.scheduler.places]


async def test_the_same_key_is_the_same_request_over_http(mesh: Stack) -> None:
    first, again = [await mesh.http.post("/v1/completions", json=BODY, headers=KEY) for _ in range(2)]
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json(), "id, time and all"
    assert first.headers["x-forebay-request-id"] == again.headers["x-forebay-request-id"]
    assert len(set(_ids(mesh))) == 1
    assert [place.lost_epoch for place in mesh.scheduler.places] == [1 << 16, 2 << 16]
    seeds = {call.request.sampling.seed for call in mesh.workers[0].calls}
    assert len(seeds) == 1, "what the first drew"


async def test_a_stream_and_a_whole_answer_are_one_request(mesh: Stack) -> None:
    whole = await mesh.http.post("/v1/chat/completions", json=CHAT, headers=KEY)
    events = await events_of(mesh, "/v1/chat/completions", CHAT, **KEY)
    assert {event["id"] for event in events if event != "[DONE]"} == {whole.json()["id"]}
    assert {event["created"] for event in events if event != "[DONE]"} == {whole.json()["created"]}


async def test_the_same_key_is_the_same_request_over_grpc(mesh: Stack) -> None:
    request = inference_pb2.GenerateRequest(model="tiny", text="hi", sampling=types_pb2.SamplingParams(max_tokens=2))
    metadata = (("authorization", mesh.token()), *KEY.items())
    answers = [[event async for event in mesh.inference.Generate(request, metadata=metadata)] for _ in range(2)]
    started = [events[0].started for events in answers]
    assert started[0] == started[1]
    over_http = await mesh.http.post("/v1/completions", json=BODY, headers=KEY)
    assert over_http.json()["id"] == f"cmpl-{started[0].request_id}", "whichever face"


async def test_every_prompt_of_a_completion_keeps_its_id_and_seed(mesh: Stack) -> None:
    body = BODY | {"prompt": ["a", "b", "c"]}
    first, again = [await mesh.http.post("/v1/completions", json=body, headers=KEY) for _ in range(2)]
    assert first.json() == again.json()
    assert sorted(set(_ids(mesh))) == [f"{_ids(mesh)[0][:-2]}{number:02x}" for number in range(3)]
    by_id = {(call.request.request_id, call.request.sampling.seed) for call in mesh.workers[0].calls}
    assert len(by_id) == len({seed for _, seed in by_id}) == 3


async def test_without_a_key_each_is_a_request_of_its_own(mesh: Stack) -> None:
    for _ in range(2):
        await mesh.http.post("/v1/completions", json=BODY)
    assert len(set(_ids(mesh))) == 2
    assert {place.lost_epoch for place in mesh.scheduler.places} == {0}
    assert not mesh.scheduler.claims


async def test_another_request_under_the_key_is_a_422(mesh: Stack) -> None:
    await mesh.http.post("/v1/completions", json=BODY, headers=KEY)
    answer = await mesh.http.post("/v1/completions", json=BODY | {"prompt": "ho"}, headers=KEY)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "idempotency_key_reused"
    assert len(mesh.scheduler.places) == 1


async def test_another_callers_key_is_another_key(mesh: Stack) -> None:
    for subject in ("sally", "john"):
        headers = KEY | {"authorization": make_token(sub=subject)}
        assert (await mesh.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert len(set(_ids(mesh))) == 2


async def test_a_call_that_another_has_taken_over_is_a_409_that_is_not_sent_again(mesh: Stack) -> None:
    mesh.scheduler.refusals.append(StatusError(Code.ABORTED, "taken over", reason="SUPERSEDED"))
    answer = await mesh.http.post("/v1/completions", json=BODY, headers=KEY)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert answer.json()["error"]["code"] == "superseded"


@pytest.mark.parametrize("key", ["", "a b", "x" * (MAX_KEY_CHARS + 1), "tab\t", "gr\u00fcn"])
def test_what_is_no_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(StatusError) as refused:
        one_key([key])
    assert refused.value.violations[0].field == "idempotency-key"


def test_two_keys_are_as_bad_as_none() -> None:
    with pytest.raises(StatusError, match="given 2 times"):
        one_key(["a", "b"])
    assert one_key(["!" + "~" * (MAX_KEY_CHARS - 1)])
    assert one_key([]) == ""


async def test_a_bad_key_is_refused_on_both_faces(mesh: Stack) -> None:
    answer = await mesh.http.post("/v1/completions", json=BODY, headers={"idempotency-key": "a b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.inference.Generate(
            inference_pb2.GenerateRequest(text="hi"), metadata=(("authorization", mesh.token()), ("idempotency-key", "a b"))
        ).read()
    assert from_rpc(refused.value).code is Code.INVALID_ARGUMENT


async def test_a_moments_trouble_of_redis_is_waited_out(mesh: Stack) -> None:
    mesh.scheduler.claim_refusals.append(unavailable("away", 0.01, "STORE_UNAVAILABLE"))
    assert (await mesh.http.post("/v1/completions", json=BODY, headers=KEY)).status_code == 200
    mesh.scheduler.claim_refusals.append(unavailable("away", 60.0, "STORE_UNAVAILABLE"))
    assert (await mesh.http.post("/v1/completions", json=BODY, headers=KEY)).status_code == 503


def _embedding(*inputs: list[int], dimensions: int = 4) -> Embedding:
    return Embedding("0" * 32, "acme", types_pb2.LATENCY_CLASS_STANDARD, make_model(), list(inputs), dimensions, "", 30.0)


def _with(drawn: Generation, **fields: Any) -> Generation:
    return replace(drawn, **fields)


async def _outcome(first: Any, then: Any, caller: Caller = SALLY) -> str:
    """What becomes of `then` under the key of `first`."""
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], FAST)
        try:
            await claimed(mesh, SALLY, "k", first)
            await claimed(mesh, caller, "k", then)
        except StatusError as error:
            return error.reason
        finally:
            await mesh.close()
    return "same" if len({claim.key_hash for claim in scheduler.claims}) == 1 else "other"


DIFFERENT: dict[str, tuple[list[Any], list[Any]]] = {
    "tokens": ([generation([1, 2])], [generation([1, 3])]),
    "where a prompt ends": ([generation([1, 2]), generation([3])], [generation([1]), generation([2, 3])]),
    "prompts": ([generation([1])], [generation([1]), generation([1])]),
    "seed": ([generation(seed=1)], [generation(seed=2)]),
    "drawn": ([generation(seed=0)], [_with(generation(seed=0), seed_is_drawn=True)]),
    "n": ([generation(n=1)], [generation(n=2)]),
    "stop": ([generation(stop=("a",))], [generation(stop=("b",))]),
    "temperature": ([generation(temperature=0.5)], [generation(temperature=0.6)]),
    "logit_bias": ([generation(logit_bias={1: 2.0})], [generation(logit_bias={1: 3.0})]),
    "echo": ([generation(echo=True)], [generation()]),
    "chat": ([generation()], [_with(generation(), operation="chat")]),
    "reply": ([generation()], [_with(generation(), reply=ReplyForm(thinks=True))]),
    "inputs": ([_embedding([1], [2])], [_embedding([1, 2])]),
    "dimensions": ([_embedding([1])], [_embedding([1], dimensions=2)]),
    "vectors": ([generation([1])], [_embedding([1])]),
}


@pytest.mark.parametrize("what", DIFFERENT)
async def test_what_decides_on_the_answer_makes_another_request(what: str) -> None:
    assert await _outcome(*DIFFERENT[what]) == "IDEMPOTENCY_KEY_REUSED"


SAME: dict[str, tuple[list[Any], list[Any]]] = {
    "again": ([generation([1, 2], seed=3)], [generation([1, 2], seed=3)]),
    "drawn seeds": ([_with(generation(seed=3), seed_is_drawn=True)], [_with(generation(seed=4), seed_is_drawn=True)]),
    "order of biases": ([generation(logit_bias={1: 2.0, 3: 4.0})], [generation(logit_bias={3: 4.0, 1: 2.0})]),
    "deadline": ([generation(deadline_seconds=1)], [generation(deadline_seconds=2)]),
    "vectors": ([_embedding([1], [2])], [_embedding([1], [2])]),
}


@pytest.mark.parametrize("what", SAME)
async def test_what_does_not_is_the_same_request(what: str) -> None:
    assert await _outcome(*SAME[what]) == "same"


async def test_an_answer_whose_weights_are_gone_is_refused_and_not_made_up() -> None:
    then = _with(generation([1]), model=make_model(version="another"))
    assert await _outcome([generation([1])], [then]) == "IDEMPOTENCY_MODEL_CHANGED"


async def test_api_keys_and_subjects_have_keys_of_their_own() -> None:
    for caller in (Caller("acme", "john", SALLY.roles, 2e9), Caller("acme", "sally", SALLY.roles, 2e9, key_id="key1")):
        assert await _outcome([generation([1])], [generation([1])], caller) == "other"


async def test_an_embeddings_request_keeps_its_id() -> None:
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], FAST)
        (first,) = await claimed(mesh, SALLY, "k", [_embedding([1])])
        (again,) = await claimed(mesh, SALLY, "k", [_embedding([1])])
        await mesh.close()
    assert first.request_id == again.request_id
    assert (first.lost_epoch, again.lost_epoch) == (1 << 16, 2 << 16)


async def test_redis_is_told_neither_key_nor_prompt(mesh: Stack) -> None:
    await mesh.http.post("/v1/completions", json=BODY | {"prompt": "secret words"}, headers={"idempotency-key": "a-visible-key"})
    told = mesh.scheduler.claims[0].SerializeToString()
    assert b"secret" not in told
    assert b"visible" not in told
