"""A mesh of two models with two workers each: every model answers by its name, every worker works, and any process may be killed."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from forebay.v1 import admin_pb2, inference_pb2, inference_pb2_grpc, types_pb2
from services.cli.models import default
from tests.e2e import mesh as meshes
from tests.tiny_models import make_model

_NUM_STREAMS = 4
_NUM_TOKENS = 160
_READY_SECONDS = 60

Streams = list[tuple[list[int], str]]
"""Token ids and text of each."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A random Llama whose tokens are bytes, and what transformers continues "Two" with."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=len(alphabet), **shape, max_position_embeddings=512, initializer_range=0.3, eos_token_id=0)
    model: Any = make_model(config)
    model.save_pretrained(folder)
    prompt = tokenizer.encode("Two")
    with torch.inference_mode():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    return folder, tokenizer.decode(answer[0, len(prompt) :])


@pytest.fixture(scope="module")
def fleet_mesh(tiny: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[meshes.Mesh]:
    """worker-1 and worker-2 have the default model, worker-3 and worker-4 the other."""
    models = ("--model", "smollm2-135m-instruct", "--model", f"{tiny[0]}=tiny")
    with meshes.running(
        tmp_path_factory.mktemp("fleet") / "home", "--workers", "2", "--kv-memory", "256MB", "--level", "fp32", *models
    ) as mesh:
        yield mesh


@pytest.fixture
def operator(fleet_mesh: meshes.Mesh) -> Iterator[meshes.Operator]:
    with fleet_mesh.operator() as operator:
        yield operator


async def _streams(mesh: meshes.Mesh, started: asyncio.Event | None = None, grammar: types_pb2.Grammar | None = None) -> Streams:
    """Greedy and seeded streams at once; the event is set when all of them have tokens."""
    end: dict[str, Any] = {"ignore_eos": True} if grammar is None else {"grammar": grammar}
    sampling: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.9}]
    running = set()
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one(number: int) -> tuple[list[int], str]:
            params = types_pb2.SamplingParams(max_tokens=_NUM_TOKENS, seed=number, **end, **sampling[number % 2])
            request = inference_pb2.GenerateRequest(model=mesh.model, text=f"Story number {number}:", sampling=params)
            ids: list[int] = []
            text = ""
            async for event in stub.Generate(request, metadata=mesh.metadata):
                if not event.HasField("delta"):
                    continue
                assert event.delta.first_position == len(ids), "a token is lost or doubled"
                ids += event.delta.token_ids
                text += event.delta.text
                running.add(number)
                if started is not None and len(running) == _NUM_STREAMS:
                    started.set()
            return ids, text

        return list(await asyncio.gather(*map(one, range(_NUM_STREAMS))))


async def _streams_while_killing(
    mesh: meshes.Mesh, operator: meshes.Operator, process: str | None = None, grammar: types_pb2.Grammar | None = None
) -> Streams:
    """Kills a process when all streams run: a worker that has some of them, unless another is named."""
    started = asyncio.Event()
    streams = asyncio.ensure_future(_streams(mesh, started, grammar))
    await started.wait()
    busy: set[str] = set()

    def found(fleet: admin_pb2.GetFleetResponse) -> bool:
        busy.update(_busy(fleet))
        return bool(busy)

    await asyncio.to_thread(operator.wait_until, found, "a worker has streams")
    assert not streams.done()
    os.kill(mesh.processes[process] if process else mesh.worker_pid(max(busy)), signal.SIGKILL)
    return await streams


def test_each_model_answers_by_its_name(fleet_mesh: meshes.Mesh, tiny: tuple[Path, str]) -> None:
    client = fleet_mesh.openai()
    asked: dict[str, Any] = {"prompt": "Two", "temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    answers = {model: client.completions.create(model=model, **asked).choices[0].text for model in ("tiny", "smollm2-135m-instruct")}
    assert answers["tiny"] == tiny[1] != answers["smollm2-135m-instruct"]
    assert len(client.models.list().data) == 2


async def test_streams_survive_a_killed_worker_and_a_killed_scheduler(fleet_mesh: meshes.Mesh, operator: meshes.Operator) -> None:
    """One test, for what they are compared with takes its time."""
    started = asyncio.Event()
    undisturbed = asyncio.ensure_future(_streams(fleet_mesh, started))
    await started.wait()
    await asyncio.to_thread(operator.wait_until, lambda fleet: _busy(fleet) == {"worker-1", "worker-2"}, "both workers have streams")
    expected = await undisturbed
    assert all(len(ids) == _NUM_TOKENS for ids, _ in expected)

    assert await _streams_while_killing(fleet_mesh, operator) == expected
    await asyncio.to_thread(meshes.wait_until, lambda: _is_whole(operator), "the worker is back", _READY_SECONDS)

    assert await _streams_while_killing(fleet_mesh, operator, "scheduler") == expected
    await asyncio.to_thread(meshes.wait_until, lambda: _is_whole(operator), "the scheduler is back, with its workers", _READY_SECONDS)
    assert await _streams(fleet_mesh) == expected


async def test_b42f_json_survives_a_killed_worker(fleet_mesh: meshes.Mesh, operator: meshes.Operator) -> None:
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 48, "maxItems": 48}
    grammar = types_pb2.Grammar(json_schema=json.dumps(numbers))
    expected = await _streams(fleet_mesh, grammar=grammar)
    assert await _streams_while_killing(fleet_mesh, operator, grammar=grammar) == expected
    whole = [json.loads(text) for _, text in expected if text.endswith("]")]
    assert whole
    assert all(len(digits) == 48 and all(0 <= digit <= 9 for digit in digits) for digits in whole)
    await asyncio.to_thread(meshes.wait_until, lambda: _is_whole(operator), "the worker is back", _READY_SECONDS)


def test_prompts_that_begin_alike_run_on_the_same_worker(fleet_mesh: meshes.Mesh, operator: meshes.Operator) -> None:
    """The first of them finds worker-1 busy; the second finds the whole mesh idle, where load alone would choose worker-1."""
    client = fleet_mesh.openai()
    asked: dict[str, Any] = {"model": fleet_mesh.model, "temperature": 0, "extra_body": {"ignore_eos": True}}
    system = "You are a careful assistant who answers in one word. " * 20
    with client.completions.create(prompt="Once upon a time", max_tokens=200, stream=True, **asked) as stream:
        next(iter(stream))
        assert _busy(operator.fleet()) <= {"worker-1"}
        client.completions.create(prompt=system + "Name a colour.", max_tokens=1, **asked)
    fleet_mesh.wait_until_idle()  # and the scheduler knows it: what it thinks is still queued there would send this elsewhere
    usage = client.completions.create(prompt=system + "Name a fruit.", max_tokens=1, **asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 128


def _busy(fleet: admin_pb2.GetFleetResponse) -> set[str]:
    return {worker.registration.worker_id for worker in fleet.workers if worker.heartbeat.leases}


def _is_whole(operator: meshes.Operator) -> bool:
    """Four workers are ready and idle."""
    try:
        fleet = operator.fleet()
    except grpc.RpcError:  # while no scheduler answers
        return False
    return sum(worker.ready for worker in fleet.workers) == 4 and meshes.is_idle(fleet)


async def test_one_worker_may_serve_every_model_at_once(tiny: tuple[Path, str], tmp_path: Path) -> None:
    models = ("--model", "smollm2-135m-instruct", "--model", f"{tiny[0]}=tiny")
    with meshes.running(tmp_path / "home", "--share", "--kv-memory", "128MB", "--level", "fp32", *models) as mesh:
        [worker] = mesh.fleet()["workers"]
        assert len(worker["registration"]["models"]) == 2
        async with mesh.async_openai() as client:

            async def ask(model: str) -> str:
                asked = client.completions.create(model=model, prompt="Two", temperature=0, max_tokens=16, extra_body={"ignore_eos": True})
                return (await asked).choices[0].text

            answers = await asyncio.gather(*(ask(model) for model in ("tiny", "smollm2-135m-instruct") * 3))
        assert set(answers[::2]) == {tiny[1]}
        assert len(set(answers[1::2])) == 1
        mesh.wait_until_idle()


async def test_models_whose_weights_do_not_fit_at_once_take_turns(tmp_path: Path) -> None:
    """Twice the same weights, and room for them once."""
    twin = shutil.copy(default().path, tmp_path / "twin.gguf")
    both = ("--model", "smollm2-135m-instruct", "--model", f"{twin}=twin", "--level", "int4")
    with meshes.running(tmp_path / "home", "--share", "--kv-memory", "64MB", "--device-memory", "250MB", *both) as mesh:
        async with mesh.async_openai() as client:

            async def ask(model: str) -> str:
                asked = client.completions.create(model=model, prompt="Two", temperature=0, max_tokens=16, extra_body={"ignore_eos": True})
                return (await asked).choices[0].text

            answers = await asyncio.gather(*(ask(model) for model in ("smollm2-135m-instruct", "twin") * 3))
        assert len(set(answers)) == 1
        mesh.wait_until_idle()
        [worker] = mesh.fleet()["workers"]
        assert len(worker["registration"]["models"]) == 2
        assert len(worker["heartbeat"]["loaded_models"]) == 1
        here, there = sorted(worker["heartbeat"]["models"], key=lambda state: state["place"] != "MODEL_PLACE_DEVICE")
        assert there["load_seconds"] > 0
        assert set(worker["heartbeat"]["budget"]) == {"weights_bytes", "kv_bytes", "workspace_bytes", "reserve_bytes"}
        _operators_move(mesh, here["model"], there["model"])


def _operators_move(mesh: meshes.Mesh, here: str, there: str) -> None:
    """Two models with room for one: an unload, a load, and a pin that can't be."""

    def place(model: str) -> str:
        return next(s for s in mesh.fleet()["workers"][0]["heartbeat"]["models"] if s["model"] == model)["place"]

    for _ in range(2):
        assert mesh.forebay("models", "unload", here).returncode == 0
    meshes.wait_until(lambda: place(here) == "MODEL_PLACE_HOST", "the unloaded model is in host memory")
    assert "is coming to the device" in mesh.forebay("models", "load", there).stdout
    meshes.wait_until(lambda: place(there) == "MODEL_PLACE_DEVICE", "the loaded model is on the device")
    refused = mesh.forebay("models", "pin", there)
    assert refused.returncode == 1
    assert "must hold the largest other model" in refused.stderr
    assert "LoadModel" in mesh.forebay("audit").stdout
