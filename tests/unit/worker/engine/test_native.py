"""The CPU kernels against the torch decoder, and against themselves: alone, in chunks, in company, on any number of threads."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.engine.kernels.cache import ELEMENT_BYTES, page_bytes
from services.worker.engine.loader import load, read_config
from services.worker.engine.models.native import MAX_BLOCK_SIZE, MAX_HEAD_DIM, NativeDecoder, unsupported
from services.worker.engine.models.step import Step
from services.worker.engine.quantization import LEVELS
from tests.tiny_models import CONFIGS, VOCAB, load_native, make_cache, random_tokens, run_alone, run_together, save_model

KV_FORMATS = ("fp32", "bf16", "int8", "fp8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each shape."""
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in made.items():
        save_model(name, folder)
    return made


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Of logits, in parts of their size."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_torch_decoder(name: str, folders: dict[str, Path]) -> None:
    tokens = random_tokens(300, seed=1)
    expected = run_alone(load(folders[name]), tokens)
    torch.testing.assert_close(run_alone(load_native(folders[name]), tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_each_cache_format_is_the_torch_decoders(kv_format: str, name: str, folders: dict[str, Path]) -> None:
    """Nearer than either is to an exact cache; at bf16 the kernels round queries and probabilities, too."""
    tokens = random_tokens(300, seed=3)
    exact, oracle = (run_alone(load(folders[name]), tokens, kv_format=kind) for kind in ("fp32", kv_format))
    ours = run_alone(load_native(folders[name]), tokens, kv_format=kv_format)
    assert distance(ours, oracle) < max({"bf16": 0.95}.get(kv_format, 0.6) * distance(oracle, exact), 1e-5)
    assert distance(oracle, exact) < {"fp32": 1e-5, "bf16": 0.02, "int8": 0.1, "fp8": 0.3}[kv_format]


@pytest.mark.parametrize("level", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_each_integer_level_is_the_torch_decoders(level: str, name: str, folders: dict[str, Path]) -> None:
    """Nearer by far than the level is to fp32. Beyond a few tokens a last bit that rounds otherwise grows, as in any 8-bit network."""
    tokens = random_tokens(40, seed=2)
    oracle, exact = run_alone(load(folders[name], level=level), tokens), run_alone(load(folders[name]), tokens)
    ours = run_alone(load_native(folders[name], level), tokens)
    assert distance(ours, oracle) < 0.5 * distance(oracle, exact)
    assert distance(ours[:1], oracle[:1]) < 0.01


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_bf16_is_nearer_to_fp32_than_the_torch_decoders(name: str, folders: dict[str, Path]) -> None:
    """The kernels keep sums, norms and the residual stream in fp32."""
    tokens = random_tokens(40, seed=2)
    exact = run_alone(load(folders[name]), tokens)
    ours, theirs = run_alone(load_native(folders[name], "bf16"), tokens), run_alone(load(folders[name], level="bf16"), tokens)
    assert 0 < distance(ours, exact) < distance(theirs, exact)


def test_200_rounds_of_random_chunks_in_company_are_bit_equal_to_token_by_token(folders: dict[str, Path]) -> None:
    """Every shape, level and cache format: threads that share a word, or a tile that looks at its neighbour, would show here."""
    rng = random.Random(4)
    rounds = [(name, level, kv_format) for name in CONFIGS for level in LEVELS for kv_format in KV_FORMATS]
    rounds += rng.choices(rounds, k=200 - len(rounds))
    decoders = {(name, level): load_native(folders[name], level) for name in CONFIGS for level in LEVELS}
    for number, (name, level, kv_format) in enumerate(rounds):
        decoder, block_size = decoders[name, level], rng.choice([2, 4, 16, 48])
        texts = [random_tokens(rng.choice([1, 5, 30, 70]), seed=number * 8 + i) for i in range(rng.randint(1, 5))]
        together = run_together(decoder, texts, rng, block_size, kv_format)
        for text, logits in zip(texts, together, strict=True):
            alone = run_alone(decoder, text, [1] * len(text), kv_format=kv_format)
            assert torch.equal(logits, alone), (number, name, level, kv_format, block_size)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_long_contexts_in_company_and_across_splits(kv_format: str, folders: dict[str, Path]) -> None:
    decoder, rng = load_native(folders["qwen3"], "int8"), random.Random(5)
    texts = [random_tokens(count, seed=count) for count in (255, 256, 257, 700)]
    for text, logits in zip(texts, run_together(decoder, texts, rng, 16, kv_format), strict=True):
        assert torch.equal(logits, run_alone(decoder, text, kv_format=kv_format))


def test_block_sizes_change_no_bit_of_floats(folders: dict[str, Path]) -> None:
    decoder, text = load_native(folders["mistral-window"]), random_tokens(290, seed=6)
    expected = run_alone(decoder, text)
    for block_size in (1, 3, 7, 64, 256):
        assert torch.equal(run_alone(decoder, text, block_size=block_size), expected), block_size


def test_the_number_of_threads_changes_no_bit(folders: dict[str, Path]) -> None:
    text = random_tokens(120, seed=7)
    one, two, five = (
        run_alone(load_native(folders["llama"], "int4", threads), text, [50, 1, 1], kv_format="int8") for threads in (1, 2, 5)
    )
    assert torch.equal(one, two)
    assert torch.equal(one, five)


def test_a_models_nan_reaches_its_logits_and_nobody_elses(folders: dict[str, Path]) -> None:
    for level in LEVELS:
        decoder = load_native(folders["llama"], level)
        kv = make_cache(decoder, 4, 16, "int8" if level == "int4" else "fp32")
        step = Step([1, 2, 3, 4], [2, 2], [2, 18], [[0], [1, 2]], [0, 1, 2, 3])  # block 1 was never written: it holds NaN
        logits = decoder.forward(step, kv)
        assert logits[:2].isfinite().all(), level
        assert logits[2:].isnan().all(), level


def test_8_bit_caches_hold_nearly_twice_as_many_blocks(folders: dict[str, Path]) -> None:
    config = replace(read_config(folders["llama"]), head_dim=64)
    for kv_format in ("int8", "fp8"):
        assert page_bytes(config, 16, "bf16") / page_bytes(config, 16, kv_format) >= 1.9
    assert ELEMENT_BYTES.keys() == set(KV_FORMATS)


def test_what_the_kernels_cant_hold_is_named(folders: dict[str, Path]) -> None:
    config = read_config(folders["llama"])
    assert unsupported(config, MAX_BLOCK_SIZE) is None
    assert unsupported(config, MAX_BLOCK_SIZE + 1) == "block_size is 257; the kernels hold 256"
    assert unsupported(replace(config, head_dim=MAX_HEAD_DIM + 2), 16) == "head_dim is 258; the kernels hold 256"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [VOCAB]},
        {"tokens": [-1]},
        {"tokens": [1, 2]},
        {"block_tables": [[64]]},
        {"block_tables": [[-1]]},
        {"block_tables": [[]]},
        {"query_lengths": [0]},
        {"context_lengths": [3000], "block_tables": [[0] * 200]},
        {"logit_rows": [1]},
        {"logit_rows": [-1]},
    ],
)
def test_nothing_out_of_bounds_reaches_the_kernels(wrong: dict[str, object], folders: dict[str, Path]) -> None:
    decoder: NativeDecoder = load_native(folders["llama"])
    step = Step([1], [1], [1], [[0]], [0])
    kv = make_cache(decoder)
    assert math.isfinite(decoder.forward(step, kv).sum())
    with pytest.raises(AssertionError):
        decoder.forward(replace(step, **wrong), kv)
