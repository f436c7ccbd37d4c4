"""Which decoder computes: the CPU kernels where they are compiled and fit, else torch, or an error where they were asked for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine import backend
from services.worker.engine.backend import BackendError
from services.worker.engine.config import EngineConfig, ModelConfig, Verification
from services.worker.engine.engine import Engine
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import page_bytes as native_page_bytes
from services.worker.engine.kv_cache import page_bytes
from services.worker.engine.loader import read_config
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.native import NativeDecoder
from services.worker.engine.request import EngineRequest
from tests.drafters import always
from tests.engine_harness import greedy, run, tokens_of
from tests.tiny_models import kernels, save_model

CONFIG = EngineConfig(num_blocks=8, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    save_model("llama", made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelConfig:
    return read_config(folder)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", kernels)


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", lambda: None)


def test_auto_takes_the_kernels_where_they_fit(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.kernels(CONFIG, model) is kernels()
    assert backend.kernels(replace(CONFIG, backend="native"), model) is kernels()
    assert backend.kernels(replace(CONFIG, backend="torch"), model) is None
    assert backend.kernels(replace(CONFIG, block_size=257), model) is None
    assert backend.kernels(replace(CONFIG, device="cuda:0"), model) is None
    without_library(monkeypatch)
    assert backend.kernels(CONFIG, model) is None


Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("change", "break_", "words"),
    [
        ({"device": "cuda:0"}, None, "backend native: its kernels run on the CPU, not on cuda:0"),
        ({"block_size": 257}, None, "backend native: block_size is 257; the kernels hold 256"),
        ({}, without_library, "backend native: no compiled kernels fit this machine: run make setup, which needs g++"),
    ],
)
def test_native_is_had_or_refused(
    change: dict[str, object], break_: Break | None, words: str, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if break_:
        break_(monkeypatch)
    with pytest.raises(BackendError) as caught:
        backend.kernels(replace(CONFIG, backend="native", **change), model)  # type: ignore[arg-type]
    assert str(caught.value) == words


def test_a_block_has_the_size_of_its_backend(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for kv_format in ("fp32", "bf16", "int8", "fp8"):
        config = replace(CONFIG, kv_format=kv_format)
        assert backend.block_bytes(config, model) == native_page_bytes(model, 16, kv_format)
        assert backend.block_bytes(replace(config, backend="torch"), model) == page_bytes(model, 16, kv_format)


def test_an_engine_has_the_decoder_and_cache_of_its_backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.from_path(folder, replace(CONFIG, level="int8", kv_format="fp8"))
    assert isinstance(engine.runner.model, NativeDecoder)  # type: ignore[attr-defined]
    assert engine.runner.kv.kv_format == "fp8"  # type: ignore[attr-defined]
    without_library(monkeypatch)
    engine = Engine.from_path(folder, replace(CONFIG, level="int8"))
    assert isinstance(engine.runner.model, Decoder)  # type: ignore[attr-defined]
    assert engine.runner.kv.kv_format == "bf16"  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", ["native", "torch"])
@pytest.mark.parametrize("verification", list(Verification))
def test_weights_may_draft_for_themselves_at_a_lower_level(
    folder: Path, by: str, verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.engine.engine.Speculator", lambda drafter, max_drafts: always(max_drafts, drafter))
    config = replace(CONFIG, level="bf16", kv_format="fp32", backend=by, num_blocks=32, verification=verification)
    requests = [EngineRequest(str(index), [index + 1, 2, 3], greedy(20)) for index in range(3)]
    told: list[tuple[int, int]] = []
    drafting = Engine.from_path(folder, replace(config, draft_level="int4", speculation=4), lambda *done: told.append(done))
    assert tokens_of(run(drafting, requests)) == tokens_of(run(Engine.from_path(folder, config), requests))
    assert drafting.stats().num_accepted_tokens > 0
    assert told == sorted(told), "one file, read twice, is one progress"
    assert told[-1][0] == told[-1][1]
