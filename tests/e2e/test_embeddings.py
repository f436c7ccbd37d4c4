"""all-MiniLM-L6-v2 beside a chat model on one worker: the vectors are transformers', by every face, whatever else runs and dies."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, BertModel

from forebay.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e import mesh as meshes
from tests.tiny_encoders import minilm, reference

NAME, CHAT = "all-minilm-l6-v2", "smollm2-135m-instruct"
TEXTS = ["How is the weather today?", "Is it raining outside?", "Füchse überqueren Straßen. 狐 🦊", "stop", "The river froze over. " * 30]
CLOSE = {"rtol": 0, "atol": 1e-3}


@pytest.fixture(scope="module")
def shared(mesh: meshes.Mesh) -> meshes.Mesh:
    """One worker with both models, as `forebay up` makes it."""
    assert {NAME, CHAT} <= set(mesh.models)
    assert "worker-2" not in mesh.processes
    return mesh


@cache
def oracle() -> Callable[[str], list[int]]:
    """transformers' own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    return lambda text: list(tokenizer(text)["input_ids"])


@cache
def oracle_model() -> BertModel:
    return BertModel.from_pretrained(minilm()).eval()


def expected(texts: Sequence[str]) -> Tensor:
    return torch.stack([reference(oracle_model(), oracle()(text)) for text in texts])


def vectors_of(answer: Any) -> Tensor:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return torch.tensor([entry.embedding for entry in answer.data])


def test_the_openai_sdk_gets_transformers_vectors(shared: meshes.Mesh) -> None:
    client = shared.openai()
    truth = expected(TEXTS)
    by_default = client.embeddings.create(model=NAME, input=TEXTS)  # in base64
    as_floats = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    by_ids = client.embeddings.create(model=NAME, input=[oracle()(text) for text in TEXTS])
    for answer in (by_default, as_floats, by_ids):
        torch.testing.assert_close(vectors_of(answer), truth, **CLOSE)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(oracle()(text)) for text in TEXTS)
    one = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=64)
    torch.testing.assert_close(vectors_of(one)[0], truth[0, :64] / truth[0, :64].norm(), **CLOSE)


def test_grpc_gives_the_same(shared: meshes.Mesh) -> None:
    request = inference_pb2.EmbedRequest(model=NAME, inputs=[inference_pb2.EmbedInput(text=text) for text in TEXTS])
    with shared.channel() as channel:
        events = list(inference_pb2_grpc.InferenceServiceStub(channel).Embed(request, metadata=shared.metadata))
    vectors = {one.index: list(one.values) for event in events for one in event.embeddings.embeddings}
    torch.testing.assert_close(torch.tensor([vectors[index] for index in range(len(TEXTS))]), expected(TEXTS), **CLOSE)
    assert events[-1].WhichOneof("event") == "finished"


def test_an_input_that_is_too_long_is_refused_by_name(shared: meshes.Mesh) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has \d+ tokens: the model takes at most 256 in one input") as caught:
        shared.openai().embeddings.create(model=NAME, input=["short", "long " * 300])
    assert caught.value.param == "input[1]"


def test_a_model_is_asked_for_what_it_does_alone(shared: meshes.Mesh) -> None:
    client = shared.openai()
    with pytest.raises(openai.BadRequestError, match=f"the model {NAME} turns texts into vectors"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match=f"the model {CHAT} generates text"):
        client.embeddings.create(model=CHAT, input="hi")


async def test_a_large_call_and_a_chat_share_the_worker(shared: meshes.Mesh) -> None:
    texts = [f"{number} green bottles" for number in range(600)]
    async with shared.async_openai() as client:
        asked = {
            "model": CHAT,
            "messages": [{"role": "user", "content": "Name the capital of France."}],
            "temperature": 0,
            "max_tokens": 16,
        }
        alone = await client.chat.completions.create(**asked)
        large = asyncio.create_task(client.embeddings.create(model=NAME, input=texts))
        beside = await client.chat.completions.create(**asked)
        assert not large.done()  # the chat didn't wait for all of it
        small = await client.embeddings.create(model=NAME, input="a small one")
        answer = await large
    assert beside.choices[0].message.content == alone.choices[0].message.content
    torch.testing.assert_close(vectors_of(small), expected(["a small one"]), **CLOSE)
    torch.testing.assert_close(vectors_of(answer)[::100], expected(texts[::100]), **CLOSE)
    shared.wait_until_idle()


def test_what_was_embedded_is_in_the_orgs_usage_and_explained(shared: meshes.Mesh) -> None:
    def used() -> int:
        rows = httpx.get(f"{shared.http_base_url}/usage", headers={"authorization": f"Bearer {shared.token}"}).json()["data"]
        return sum(row["prompt_tokens"] for row in rows if row["model"].startswith(NAME))

    before = used()
    answer = httpx.post(
        f"{shared.http_base_url}/embeddings", json={"input": "one two three"}, headers={"authorization": f"Bearer {shared.token}"}
    )
    meshes.wait_until(lambda: used() == before + 5, "the usage is written")  # three words between [CLS] and [SEP]
    explained = shared.forebay("explain", answer.headers["x-forebay-request-id"], "--json")
    assert json.loads(explained.stdout)["usage"]["prompt_tokens"] == 5


def test_the_command_line(shared: meshes.Mesh) -> None:
    done = shared.forebay("embed", "a cat", "a kitten", "a lease")
    assert done.returncode == 0, done.stderr
    cosines = [float(line.split()[0]) for line in done.stdout.splitlines()]
    assert cosines[0] == 1.0
    assert cosines[1] > cosines[2]
    piped = shared.forebay("embed", "--json", "--dimensions", "8", text="one\n\ntwo\n")
    assert [(line["text"], len(line["embedding"])) for line in map(json.loads, piped.stdout.splitlines())] == [("one", 8), ("two", 8)]


async def test_a_worker_that_dies_costs_no_vector(tmp_path: Path) -> None:
    texts = [f"the number {number} in words and more words" for number in range(1500)]
    with meshes.running(tmp_path / "home", "--workers", "2", "--model", NAME) as mesh, mesh.operator() as operator:
        async with mesh.async_openai() as client:
            call = asyncio.create_task(client.embeddings.create(model=NAME, input=texts))

            busy: list[str] = []

            def begun() -> bool:
                """Whether a worker has computed some of it."""
                workers = operator.fleet().workers
                busy.extend(w.registration.worker_id for w in workers if w.heartbeat.num_running and w.heartbeat.leases)
                return bool(busy)

            await asyncio.to_thread(meshes.wait_until, begun, "a worker has begun")
            os.kill(mesh.processes[busy[0]], signal.SIGKILL)
            answer = await call
        torch.testing.assert_close(vectors_of(answer)[::250], expected(texts[::250]), **CLOSE)
        # A worker whose lease is still held may refuse the first try of another placement.
        address = f"http://{_internal(mesh, 'gateway')}/metrics"
        replaced = re.compile(r"^forebay_replacements_total [1-9]", re.MULTILINE)
        await asyncio.to_thread(meshes.wait_until, lambda: bool(replaced.search(httpx.get(address).text)), "the replacement is counted")


def _internal(mesh: meshes.Mesh, service: str) -> str:
    address: str = json.loads((mesh.home / "mesh.json").read_text())["internal_addresses"][service]
    return address
