"""Several models on one device from their files: which take turns, which fail alone, and what is refused at the start."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ByteSize

from services.common.settings import SettingsError
from services.worker import loading
from services.worker.engine.engine import Engine
from services.worker.engine.kernels import library
from services.worker.engine.request import EngineRequest, FinishReason, TokenOutput
from services.worker.loading import Loaded
from services.worker.settings import WorkerSettings
from services.worker.sharing.device import SharedDevice
from tests.engine_harness import greedy, run
from tests.tiny_models import kernels, save_model

Load = Callable[..., Loaded]
KV = 4_000_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("llama", "qwen3", "mistral")}
    for name, folder in made.items():
        save_model(name, folder)
    return made


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", kernels)


@pytest.fixture
def load(folders: dict[str, Path]) -> Load:
    """Loads them all, with further settings."""

    def load(**fields: object) -> Loaded:
        model = ",".join(f"{folder}={name}" for name, folder in folders.items())
        settings = WorkerSettings.model_validate(
            {"model": model, "level": "bf16", "kv_memory": KV, "swap_memory": 0, "num_threads": 1, "max_sequences": 4} | fields
        )
        loaded = asyncio.run(loading.load(settings, asyncio.Event()))
        assert loaded is not None
        return loaded

    return load


def device_memory(load: Load, weights: int) -> ByteSize:
    """So much that weights get as many bytes."""
    with pytest.raises(SettingsError) as caught:
        load(device_memory=ByteSize(KV + 1))
    workspace = int(str(caught.value).partition("workspaces ")[2].partition(",")[0])
    return ByteSize((KV + workspace + weights) * 20 // 19 + 20)


def answers(loaded: Loaded, max_steps: int = 2000) -> dict[str, TokenOutput]:
    """One request to each model, all at once."""
    engines = {served.model: engine for engine, served in loaded.models}
    device = SharedDevice(engines, loaded.arena, engines, loaded.weights)
    for model in engines:
        device.add(EngineRequest(model, [1, 2, 3], greedy(8), model=model))
    ended: dict[str, TokenOutput] = {}
    tokens: dict[str, list[int]] = {model: [] for model in engines}
    for now in range(max_steps):
        if not device.has_work:
            break
        for output in device.step(0.3 * now).outputs:
            tokens[output.request_id] += output.token_ids
            ended[output.request_id] = output
    for model, output in ended.items():
        output.token_ids = tokens[model]
    return ended


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_models_take_turns_in_device_memory_that_holds_only_some(load: Load, backend: str) -> None:
    all_stay = load(backend=backend)
    assert all_stay.weights is None
    expected = {model: output.token_ids for model, output in answers(all_stay).items()}
    sizes = [len(loading.decoder_of(engine).weights) for engine, _ in all_stay.models]  # type: ignore[union-attr]
    turns = load(device_memory=device_memory(load, max(sizes) + 4096), backend=backend)
    assert turns.weights is not None
    assert {model: output.token_ids for model, output in answers(turns).items()} == expected
    assert sum(resident.num_loads for resident in turns.weights.residency.residents.values()) >= 3


def test_a_model_beyond_the_budget_ends_its_requests_with_the_numbers_and_no_others(load: Load) -> None:
    sizes = {served.model: len(loading.decoder_of(engine).weights) for engine, served in load().models}  # type: ignore[union-attr]
    largest = max(sizes, key=lambda model: sizes[model])
    second = sorted(sizes.values())[-2]
    told = answers(load(device_memory=device_memory(load, second + 4096)))
    assert told.pop(largest).finish_reason is FinishReason.ERROR
    assert [output.finish_reason for output in told.values()] == [FinishReason.LENGTH] * 2


def test_a_damaged_file_fails_its_own_models_requests(load: Load, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = folders["qwen3"] / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    try:
        for fields in ({}, {"device_memory": device_memory(load, 1 << 20)}):
            told = answers(load(**fields))
            error = told.pop("qwen3@bf16").error
            assert error is not None
            assert error.startswith("model qwen3 can't be served here: ")
            assert "model.safetensors" in error
            assert [output.finish_reason for output in told.values()] == [FinishReason.LENGTH] * 2
    finally:
        weights.write_bytes(whole)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device_memory": 1000}, "FOREBAY_DEVICE_MEMORY=1000 leaves nothing for weights: FOREBAY_KV_MEMORY takes 4000000 bytes"),
        ({"device_memory": 10**15}, "this host has .* left: lower it"),
        (
            {"device_memory": 10**8, "draft_level": "int4"},
            "FOREBAY_DRAFT_LEVEL is a second copy of the weights, which FOREBAY_DEVICE_MEMORY",
        ),
        (
            {"device_memory": 10**8, "pinned_models": "llama,who"},
            "FOREBAY_PINNED_MODELS names who, which FOREBAY_MODEL doesn't: it has llama",
        ),
    ],
)
def test_device_memory_that_cannot_be_is_one_line(load: Load, fields: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(**fields)


def test_where_no_model_fits_the_worker_does_not_start(load: Load) -> None:
    with pytest.raises(SettingsError, match=r"its weights take \d+ bytes; the device has \d+ for weights"):
        load(device_memory=device_memory(load, 5000))


def test_a_pinned_model_stays(load: Load) -> None:
    loaded = load(device_memory=device_memory(load, 400_000), pinned_models="llama")
    assert loaded.weights is not None
    assert loaded.weights.residency.residents["llama@bf16"].pinned
    answers(loaded)
    assert loaded.weights.residency.residents["llama@bf16"].num_evictions == 0


def test_a_lone_model_must_fit_and_stays(folders: dict[str, Path]) -> None:
    base = {"model": str(folders["llama"]), "level": "bf16", "kv_memory": KV, "swap_memory": 0, "num_threads": 1, "max_sequences": 4}
    loaded = asyncio.run(loading.load(WorkerSettings.model_validate(base | {"device_memory": 40_000_000}), asyncio.Event()))
    assert loaded is not None
    assert loaded.weights is None
    engine: Engine = loaded.models[0][0]
    assert run(engine, [EngineRequest("r", [1], greedy(1))])
    with pytest.raises(SettingsError, match="its weights take"):
        asyncio.run(loading.load(WorkerSettings.model_validate(base | {"device_memory": 4_900_000}), asyncio.Event()))


def test_a_file_that_is_lost_after_the_start_fails_nobody_and_one_cut_short_its_own_model(load: Load, tmp_path: Path) -> None:
    """Workers map one file of packed weights, and never read the checkpoint again."""
    sizes = [len(loading.decoder_of(engine).weights) for engine, _ in load().models]  # type: ignore[union-attr]
    cache = tmp_path / "weights"
    fields = {"device_memory": device_memory(load, max(sizes) + 4096), "weights_cache": cache}
    expected = answers(load(**fields))
    lost, short = load(**fields), load(**fields)
    files = {loading.decoder_of(engine)._packed.path: served.model for engine, served in short.models}  # type: ignore[union-attr]
    assert len(set(files)) == 3
    path, model = next(iter(files.items()))
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    told = answers(short)
    error = told.pop(model).error
    assert error is not None
    assert "cut short while it was in use" in error
    assert {name: output.token_ids for name, output in told.items()} == {n: o.token_ids for n, o in expected.items() if n != model}
    path.write_bytes(whole)
    for file in files:
        file.unlink()
    assert {name: output.token_ids for name, output in answers(lost).items()} == {n: o.token_ids for n, o in expected.items()}
