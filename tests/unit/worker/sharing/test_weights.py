"""Six real models on room for two or three: all that each says is what it says alone, whoever comes and goes meanwhile."""

import random
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.kernels import library
from services.worker.engine.loader import read_config
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.native import NativeDecoder
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from services.worker.sharing import layout
from services.worker.sharing.arena import Arena
from services.worker.sharing.device import SharedDevice
from services.worker.sharing.residency import Place
from services.worker.sharing.weights import FailedRunner, Weights
from services.worker.weights_figures import figures
from tests.clockwork import Clockwork
from tests.engine_harness import Key, collect, run
from tests.tiny_models import CONFIGS, VOCAB, kernels, make_model

BASE = EngineConfig(num_threads=1, max_step_tokens=48, max_sequences=6, swap_blocks=4, backend="native", level="bf16")


def arrive(weights: Weights, decoder: Clockwork, work: dict[str, int], now: float) -> None:
    decoder.let_come.set()
    weights.finish()
    weights.advance(work, now)


def test_one_that_is_arriving_steps_only_where_nobody_else_can() -> None:
    a, b = Clockwork(), Clockwork()
    weights = Weights(2 * 4096, {"a": a, "b": b})
    assert a.place is None
    work = {"a": 2, "b": 2}
    weights.advance(work, 0.0)
    assert weights.able(work) == ["a"]
    assert not weights.is_there("a")
    arrive(weights, a, work, 0.1)
    assert weights.is_there("a")
    assert weights.on_device(["a", "b", "elsewhere"]) == ["a", "elsewhere"]
    assert weights.able(work) == ["a"], "b is arriving, and a needs no copy"
    assert weights.able(["b"]) == ["b"]
    arrive(weights, b, work, 0.2)
    assert weights.able(work) == ["a", "b"]
    assert a.place is not None
    assert b.place is not None
    assert a.place.data_ptr() + 4096 == b.place.data_ptr()


def test_who_waits_for_a_place_is_not_able_and_who_gives_way_is_nowhere() -> None:
    a, b = Clockwork(), Clockwork()
    weights = Weights(4096, {"a": a, "b": b})
    weights.advance({"a": 2}, 0.0)
    arrive(weights, a, {"a": 2}, 0.1)
    weights.advance({"b": 2}, 0.2)
    assert weights.able(["b"]) == []
    weights.advance({"b": 2}, 5.0)
    assert weights.able(["b"]) == ["b"]
    assert a.place is None


def test_nobody_pays_for_a_step_while_the_weights_that_are_wanted_are_elsewhere(folders: dict[str, Path]) -> None:
    """The first model has just come, so the second can't yet."""
    device, weights, _ = on_a_device(folders, 1, num_pages=60)
    first, second = (requests_to(model)[0] for model in list(folders)[:2])
    device.add(first)
    while device.has_work:
        device.took(device.step(0.0).model, 0.01)
        weights.finish()
    device.add(second)
    stepped = device.step(0.5)
    device.took(stepped.model, 0.01)
    assert (stepped.model, stepped.outputs, stepped.num_tokens) == (second.model, [], 0)
    stepped = device.step(1.5)
    assert stepped.num_tokens > 0


def test_models_without_weights_that_move_are_always_able() -> None:
    weights = Weights(4096, {"large": Clockwork(4097)})
    assert "raise the device memory" in weights.failures["large"]
    weights.advance({"large": 1, "other": 1}, 0.0)
    assert weights.able(["large", "other"]) == ["large", "other"]


def test_figures_tell_where_weights_are() -> None:
    a, b = Clockwork(), Clockwork()
    weights = Weights(4096, {"a": a, "b": b})
    registry = CollectorRegistry()
    for figure in figures(weights):
        registry.register(figure)

    def read(name: str, model: str) -> float | None:
        return registry.get_sample_value(f"forebay_worker_weights_{name}", {"model_name": model, "engine": "0"})

    weights.advance({"a": 2}, 0.0)
    assert read("on_device", "a") == 0
    arrive(weights, a, {"a": 2}, 0.1)
    assert (read("on_device", "a"), read("on_device", "b"), read("loads_total", "a")) == (1, 0, 1)
    weights.advance({"b": 2}, 5.0)
    assert (read("on_device", "a"), read("evictions_total", "a"), read("bytes", "b")) == (0, 1, 4096)
    assert registry.get_sample_value("forebay_worker_weights_budget_bytes") == 4096


# --- real ones


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three shapes, each with two sets of weights."""
    made = {}
    for seed in (0, 1):
        for name in ("llama", "qwen3", "llama-tied"):
            made[f"{name}-{seed}"] = tmp_path_factory.mktemp(f"{name}-{seed}")
            make_model(CONFIGS[name], seed).save_pretrained(made[f"{name}-{seed}"])
    return made


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", kernels)


def requests_to(model: str) -> list[EngineRequest]:
    rng = random.Random(model)
    return [
        EngineRequest(
            f"{model} {index}",
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))],
            SamplingParams(max_tokens=rng.randint(1, 30), temperature=rng.choice([0.0, 1.0]), seed=index, ignore_eos=True, logprobs=1),
            latency_class=rng.randint(1, 3),
            model=model,
        )
        for index in range(4)
    ]


def decoder_of(engine: Engine) -> NativeDecoder:
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner.model, NativeDecoder)
    return engine.runner.model


def on_a_device(folders: dict[str, Path], num_places: float, num_pages: int) -> tuple[SharedDevice, Weights, Arena]:
    """Room for so many of the largest model's weights."""
    size, configs = layout.sized({model: (BASE, read_config(folder)) for model, folder in folders.items()})
    pages, arena = layout.allocate(num_pages, size, "cpu"), Arena(num_pages)
    parts = {model: arena.open(model) for model in folders}
    engines = {model: Engine.from_path(folder, configs[model], shared=(parts[model], pages)) for model, folder in folders.items()}
    decoders = {model: decoder_of(engine) for model, engine in engines.items()}
    largest = max(len(decoder.weights) for decoder in decoders.values())
    weights = Weights(int(num_places * largest) + 4096 * len(folders), decoders)
    return SharedDevice(engines, arena, engines, weights), weights, arena


@pytest.mark.parametrize("num_places", [1, 2.5])
def test_ids_and_logprobs_of_six_models_on_room_for_few_equal_each_alone(folders: dict[str, Path], num_places: float) -> None:
    """KV of what is under way stays in the arena while its model is away."""
    expected = {}
    for model, folder in folders.items():
        expected |= run(Engine.from_path(folder, BASE), requests_to(model))
    device, weights, arena = on_a_device(folders, num_places, num_pages=60)
    coming = [request for model in folders for request in requests_to(model)]
    rng = random.Random(0)
    rng.shuffle(coming)
    whole: dict[Key, TokenOutput] = {}
    now = 0.0
    while coming or device.has_work:
        if coming and rng.random() < 0.3:
            device.add(coming.pop())
        if device.has_work:
            stepped = device.step(now)
            device.took(stepped.model, 0.15)
            collect(stepped.outputs, whole)
        now += 0.15
        device.check_integrity()
        weights.residency.check_integrity()
    assert {key: (o.token_ids, o.logprobs) for key, o in whole.items()} == {k: (o.token_ids, o.logprobs) for k, o in expected.items()}
    arena.check_integrity([])
    loads = {model: resident.num_loads for model, resident in weights.residency.residents.items()}
    assert min(loads.values()) >= 1
    assert max(loads.values()) >= 2, "nobody went and came again: nothing is shown"
    assert all(count <= now + 1 for count in loads.values())


def test_a_model_that_cannot_be_served_ends_its_own_requests_with_the_reason(folders: dict[str, Path]) -> None:
    device, _, arena = on_a_device(folders, 3, num_pages=60)
    broken, sound = list(folders)[:2]
    member = device.members[broken]
    assert isinstance(member, Engine)
    member.runner = FailedRunner(broken, "the file is damaged")
    whole: dict[Key, TokenOutput] = {}
    for model in (broken, sound):
        for request in requests_to(model):
            device.add(request)
    now = 0.0
    while device.has_work:
        collect(device.step(now).outputs, whole)
        now += 0.15
    for (request_id, _), output in whole.items():
        if request_id.startswith(broken):
            assert output.finish_reason is FinishReason.ERROR
            assert output.error == f"model {broken} can't be served here: the file is damaged"
        else:
            assert output.finish_reason is FinishReason.LENGTH
    arena.check_integrity([])


def test_steps_that_wait_for_weights_teach_nothing_of_step_times(folders: dict[str, Path]) -> None:
    device, weights, _ = on_a_device(folders, 1, num_pages=60)
    model = next(iter(folders))
    device.add(requests_to(model)[0])
    member = device.members[model]
    assert isinstance(member, Engine)
    seen = []
    step = member.step

    def spy(now: float) -> list[TokenOutput]:
        seen.append(member.is_delayed)
        assert member.is_delayed == (weights.residency.residents[model].place is Place.ARRIVING)
        return step(now)

    member.step = spy  # type: ignore[method-assign]
    device.step(0.0)
    weights.finish()
    while device.has_work:
        device.step(0.1)
    assert seen[0] is True
    assert seen[-1] is False
