"""Weights that come to the device layer by layer while a step waits for them: every bit is as if they had always been there."""

import threading
from pathlib import Path

import pytest
import torch

from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.kernels.memory import ALIGNMENT, Flat
from services.worker.engine.kv_cache import KVCache
from services.worker.engine.loader import load
from services.worker.engine.models.moving import MovingWeights
from services.worker.engine.models.native import NativeDecoder
from tests.tiny_models import CONFIGS, AnyDecoder, Chunk, load_native, make_cache, random_tokens, run_step, save_model


@pytest.fixture(scope="module", params=["llama", "llama-tied", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_model(request.param, made)
    return made


Mover = NativeDecoder | MovingWeights
Bound = tuple[AnyDecoder, Mover, NativeCache | KVCache]


def bound(folder: Path, level: str, kind: str = "native") -> Bound:
    decoder: AnyDecoder = load_native(folder, level) if kind == "native" else load(folder, level=level)
    kv = make_cache(decoder)
    if isinstance(decoder, NativeDecoder):
        assert isinstance(kv, NativeCache)
        decoder.bind(kv)
        return decoder, decoder, kv
    return decoder, MovingWeights(decoder), kv


def a_step(decoder: AnyDecoder, kv: NativeCache | KVCache) -> torch.Tensor:
    text = random_tokens(50, 1)
    return run_step(decoder, kv, [Chunk(text, 0, 50, [3, 1, 2, 0])])[0]


def as_loaded(folder: Path, level: str, kind: str) -> torch.Tensor:
    decoder: AnyDecoder = load_native(folder, level) if kind == "native" else load(folder, level=level)
    return a_step(decoder, make_cache(decoder))


KINDS = pytest.mark.parametrize("kind", ["native", "torch"])


@KINDS
@pytest.mark.parametrize("level", ["fp32", "bf16", "int8", "int4"])
def test_a_step_that_is_computed_while_the_weights_come_has_the_same_bits(folder: Path, level: str, kind: str) -> None:
    expected = as_loaded(folder, level, kind)
    decoder, mover, kv = bound(folder, level, kind)
    device = torch.full((2 * len(mover.weights) + ALIGNMENT,), 0xFF, dtype=torch.uint8)
    for number in range(12):
        start = (-device.data_ptr()) % ALIGNMENT + (len(mover.weights) if number % 2 else 0)
        place = device[start : start + len(mover.weights)].fill_(0xFF)  # not a number, wherever it is read too early
        mover.move(place)
        bringing = threading.Thread(target=mover.bring)
        if number % 3:
            bringing.start()
            logits = a_step(decoder, kv)
            bringing.join()
        else:
            mover.bring()
            logits = a_step(decoder, kv)
        assert torch.equal(logits, expected)
        assert torch.equal(place, mover.weights)
        device.fill_(0xFF)  # and nothing is read from where they were
        mover.move(None)


@KINDS
def test_a_step_waits_for_the_layer_that_it_needs(folder: Path, kind: str) -> None:
    expected = as_loaded(folder, "bf16", kind)
    decoder, mover, kv = bound(folder, "bf16", kind)
    mover.move(torch.full_like(mover.weights, 0xFF))
    logits: list[torch.Tensor] = []
    step = threading.Thread(target=lambda: logits.append(a_step(decoder, kv)))
    step.start()
    step.join(0.05)  # however long this is, it can't end
    assert step.is_alive()
    mover.bring()
    step.join()
    assert torch.equal(logits[0], expected)


def test_weights_that_are_nowhere_compute_nothing(folder: Path) -> None:
    decoder, mover, kv = bound(folder, "bf16")
    mover.move(None)
    with pytest.raises(AssertionError, match="the weights are nowhere"):
        a_step(decoder, kv)


def test_other_threads_and_caches_start_where_the_weights_are(folder: Path) -> None:
    """Binding anew keeps the place."""
    decoder, mover, kv = bound(folder, "bf16")
    expected = a_step(decoder, kv)
    mover.move(torch.empty_like(mover.weights))
    mover.bring()
    mover.weights.fill_(0xFF)
    other = make_cache(decoder)
    assert isinstance(other, NativeCache)
    assert torch.equal(a_step(decoder, other), expected)


def test_more_than_was_said_is_refused() -> None:
    flat = Flat(100)
    flat.place(torch.ones(60, dtype=torch.uint8))
    assert flat.num_bytes == ALIGNMENT
    with pytest.raises(AssertionError):
        flat.place(torch.ones(60, dtype=torch.uint8))


def test_every_shape_fits_what_is_reserved(tmp_path: Path) -> None:
    for name in CONFIGS:
        save_model(name, tmp_path / name)
        load_native(tmp_path / name, "fp32")
