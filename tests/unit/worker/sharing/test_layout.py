"""Real decoders of several shapes on one buffer: all that they say is, bit for bit, what each says on memory of its own."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.worker.engine import backend
from services.worker.engine.backend import BackendError
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.kernels import library
from services.worker.engine.loader import read_config
from services.worker.engine.request import EngineRequest, SamplingParams, TokenOutput
from services.worker.sharing import claims, layout
from services.worker.sharing.arena import Arena
from tests.engine_harness import Key, collect, run
from tests.tiny_models import VOCAB, kernels, save_model

MODELS = ["llama", "qwen3", "llama-one-kv-head"]
BASE = EngineConfig(num_threads=1, max_step_tokens=48, max_sequences=6, swap_blocks=4)
FORMATS = [("native", "fp32", "fp32"), ("native", "bf16", "int8"), ("native", "int8", "fp8"), ("native", "int4", "bf16")]
FORMATS += [("torch", "fp32", "fp32"), ("torch", "bf16", "bf16")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        save_model(name, folder)
    return made


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", kernels)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def some_requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        EngineRequest(
            f"r{index}",
            [7] * rng.choice([0, 40]) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))],
            SamplingParams(max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=index, ignore_eos=True, logprobs=1),
            latency_class=rng.randint(1, 3),
        )
        for index in range(7)
    ]


def told(whole: dict[Key, TokenOutput]) -> dict[Key, tuple[object, ...]]:
    return {key: (output.token_ids, output.logprobs) for key, output in whole.items()}


def together(engines: dict[str, Engine], arena: Arena, rng: random.Random) -> dict[str, dict[Key, TokenOutput]]:
    """Steps of whoever has work, in any order."""
    whole: dict[str, dict[Key, TokenOutput]] = {model: {} for model in engines}
    now = 0.0
    while working := [model for model, engine in engines.items() if engine.has_work]:
        claims.settle(arena, engines, now)
        model = rng.choice(working)
        collect(engines[model].step(now), whole[model])
        now += 0.1
        for engine in engines.values():
            engine.check_integrity()
    return whole


@pytest.mark.parametrize(("kind", "level", "kv_format"), FORMATS)
def test_on_shared_pages_every_bit_is_as_on_its_own(folders: dict[str, Path], kind: str, level: str, kv_format: str) -> None:
    """Each page is full of NaN when a model gets it, unless it has been on the host."""
    base = replace(BASE, backend=kind, level=level, kv_format=kv_format)
    requests = {model: some_requests(index) for index, model in enumerate(folders)}
    expected = {}
    for model, folder in folders.items():
        alone = Engine.from_path(folder, replace(base, num_blocks=64, swap_blocks=0))
        expected[model] = told(run(alone, requests[model]))
    size, configs = layout.sized({model: (base, read_config(folder)) for model, folder in folders.items()})
    for swap_blocks in (0, 4):
        pages = layout.allocate(20, size, "cpu")
        arena = Arena(20, on_handover=None if swap_blocks else lambda page, pages=pages: pages[page].fill_(0xFF))  # type: ignore[misc]
        parts = {model: arena.open(model) for model in folders}
        engines = {
            model: Engine.from_path(folder, replace(configs[model], num_blocks=20, swap_blocks=swap_blocks), shared=(parts[model], pages))
            for model, folder in folders.items()
        }
        for model, engine in engines.items():
            for request in requests[model]:
                engine.add(request)
        whole = together(engines, arena, random.Random(swap_blocks))
        assert {model: told(outputs) for model, outputs in whole.items()} == expected
        assert sum(engine.stats().num_preemptions for engine in engines.values()) > 0, "there was room for all: nothing is shown"
        arena.check_integrity([])


def test_a_page_is_a_block_of_the_largest_and_more_tokens_of_the_others(folders: dict[str, Path]) -> None:
    shapes = {model: (replace(BASE, backend="native"), read_config(folder)) for model, folder in folders.items()}
    size, configs = layout.sized(shapes)
    assert {model: config.block_size for model, config in configs.items()} == {"llama": 32, "qwen3": 16, "llama-one-kv-head": 64}
    assert size == max(backend.block_bytes(replace(config, block_size=16), model) for config, model in shapes.values())
    for model, config in configs.items():
        used = backend.block_bytes(config, shapes[model][1])
        assert size // 2 < used <= size
        assert backend.block_bytes(replace(config, block_size=config.block_size + 16), shapes[model][1]) > size


def test_a_larger_page_holds_as_many_tokens_as_the_kernels_can(folders: dict[str, Path]) -> None:
    model = read_config(folders["llama"])
    native, by_torch = replace(BASE, backend="native"), replace(BASE, backend="torch")
    size, configs = layout.sized({"native": (native, model), "torch": (by_torch, model)}, at_least=1 << 20)
    assert size >= 1 << 20
    assert configs["native"].block_size == 256
    assert configs["torch"].block_size > 256
    assert configs["torch"].block_size % 16 == 0


def test_torchs_8_bit_caches_are_refused_by_name(folders: dict[str, Path]) -> None:
    config = replace(BASE, backend="torch", kv_format="int8")
    with pytest.raises(BackendError, match="kv_format int8: torch's 8-bit caches don't share memory"):
        layout.page_bytes([(config, read_config(folders["llama"]))])


def test_pages_are_zeros_in_one_piece() -> None:
    pages = layout.allocate(3, 128, "cpu")
    assert pages.shape == (3, 128)
    assert pages.is_contiguous()
    assert not pages.any()
