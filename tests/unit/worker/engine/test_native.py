"""The CPU kernels against the torch decoder, and against themselves: alone, in chunks, in company, on any number of threads."""

import math
import os
import random
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from services.worker.engine.config import ModelConfig, RopeConfig
from services.worker.engine.kernels.cache import ELEMENT_BYTES, page_bytes
from services.worker.engine.loader import expected_shapes, load, read_config
from services.worker.engine.models.native import MAX_BLOCK_SIZE, MAX_HEAD_DIM, NativeDecoder, unsupported
from services.worker.engine.models.step import Step
from services.worker.engine.quantization import LEVELS
from tests.tiny_models import (
    CONFIGS,
    VOCAB,
    kernels,
    load_native,
    make_cache,
    make_model,
    random_tokens,
    run_alone,
    run_together,
    save_model,
)

KV_FORMATS = ("fp32", "bf16", "int8", "fp8")
SOME = ["llama", "mistral-window", "qwen2", "qwen3"]

pytestmark = pytest.mark.timeout(300)  # the first test for a target may have to compile it


@pytest.fixture(scope="module", params=["native", "v3"])
def target(request: pytest.FixtureRequest) -> str:
    """What the kernels are compiled for: both paths of simd.h, where this machine has AVX-512."""
    return str(request.param)


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
def test_logits_are_those_of_the_torch_decoder(name: str, target: str, folders: dict[str, Path]) -> None:
    tokens = random_tokens(300, seed=1)
    expected = run_alone(load(folders[name]), tokens)
    torch.testing.assert_close(run_alone(load_native(folders[name], target=target), tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", SOME)
def test_each_cache_format_is_the_torch_decoders(kv_format: str, name: str, target: str, folders: dict[str, Path]) -> None:
    """Nearer than either is to an exact cache; at bf16 the kernels round queries and probabilities, too."""
    tokens = random_tokens(300, seed=3)
    exact, oracle = (run_alone(load(folders[name]), tokens, kv_format=kind) for kind in ("fp32", kv_format))
    ours = run_alone(load_native(folders[name], target=target), tokens, kv_format=kv_format)
    assert distance(ours, oracle) < max({"bf16": 0.95}.get(kv_format, 0.6) * distance(oracle, exact), 1e-5)
    assert distance(oracle, exact) < {"fp32": 1e-5, "bf16": 0.02, "int8": 0.1, "fp8": 0.3}[kv_format]


@pytest.mark.parametrize("level", ["int8", "int4"])
@pytest.mark.parametrize("name", SOME)
def test_each_integer_level_is_the_torch_decoders(level: str, name: str, target: str, folders: dict[str, Path]) -> None:
    """Nearer by far than the level is to fp32. Beyond a few tokens a last bit that rounds otherwise grows, as in any 8-bit network."""
    tokens = random_tokens(40, seed=2)
    oracle, exact = run_alone(load(folders[name], level=level), tokens), run_alone(load(folders[name]), tokens)
    ours = run_alone(load_native(folders[name], level, target=target), tokens)
    assert distance(ours, oracle) < 0.5 * distance(oracle, exact)
    assert distance(ours[:1], oracle[:1]) < 0.01


@pytest.mark.parametrize("name", SOME)
def test_bf16_is_nearer_to_fp32_than_the_torch_decoders(name: str, target: str, folders: dict[str, Path]) -> None:
    """The kernels keep sums, norms and the residual stream in fp32."""
    tokens = random_tokens(40, seed=2)
    exact = run_alone(load(folders[name]), tokens)
    ours, theirs = (
        run_alone(load_native(folders[name], "bf16", target=target), tokens),
        run_alone(load(folders[name], level="bf16"), tokens),
    )
    assert 0 < distance(ours, exact) < distance(theirs, exact)


def check_chunks_in_company(rounds: list[tuple[str, str, str]], target: str, rng: random.Random, folders: dict[str, Path]) -> None:
    decoders = {pair: load_native(folders[pair[0]], pair[1], target=target) for pair in {(name, level) for name, level, _ in rounds}}
    for number, (name, level, kv_format) in enumerate(rounds):
        decoder, block_size = decoders[name, level], rng.choice([2, 4, 16, 48])
        texts = [random_tokens(rng.choice([1, 5, 30, 70]), seed=number * 8 + i) for i in range(rng.randint(1, 5))]
        together = run_together(decoder, texts, rng, block_size, kv_format)
        for text, logits in zip(texts, together, strict=True):
            alone = run_alone(decoder, text, [1] * len(text), kv_format=kv_format)
            assert torch.equal(logits, alone), (number, name, level, kv_format, block_size)


ALL = [(name, level, kv_format) for name in CONFIGS for level in LEVELS for kv_format in KV_FORMATS]


@pytest.mark.timeout(300)
def test_200_rounds_of_random_chunks_in_company_are_bit_equal_to_token_by_token(folders: dict[str, Path]) -> None:
    """Every shape, level and cache format: threads that share a word, or a tile that looks at its neighbour, would show here."""
    rng = random.Random(4)
    check_chunks_in_company(ALL + rng.choices(ALL, k=200 - len(ALL)), "native", rng, folders)


def test_random_chunks_are_bit_equal_on_the_narrower_vectors_too(folders: dict[str, Path]) -> None:
    """Some: the loops are the same, only the vectors are others."""
    rng = random.Random(5)
    check_chunks_in_company(rng.sample(ALL, k=20), "v3", rng, folders)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_long_contexts_in_company_and_across_splits(kv_format: str, target: str, folders: dict[str, Path]) -> None:
    decoder, rng = load_native(folders["qwen3"], "int8", target=target), random.Random(5)
    texts = [random_tokens(count, seed=count) for count in (255, 256, 257, 700)]
    for text, logits in zip(texts, run_together(decoder, texts, rng, 16, kv_format), strict=True):
        assert torch.equal(logits, run_alone(decoder, text, kv_format=kv_format))


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_wide_heads(kv_format: str, head_dim: int, target: str, tmp_path: Path) -> None:
    """Several vectors of a head at once, and what is left of them; 5 query heads to a group, so that tasks begin within one."""
    shape = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 40, "num_hidden_layers": 2}
    make_model(LlamaConfig(vocab_size=VOCAB, head_dim=head_dim, initializer_range=0.1, **shape)).save_pretrained(tmp_path)
    decoder, oracle = load_native(tmp_path, target=target), load(tmp_path)
    texts = [random_tokens(count, seed=count) for count in (1, 13, 270)]
    together = run_together(decoder, texts, random.Random(head_dim), 16, kv_format)
    for text, logits in zip(texts, together, strict=True):
        assert torch.equal(logits, run_alone(decoder, text, kv_format=kv_format))
        expected = run_alone(oracle, text, kv_format=kv_format)
        assert distance(logits, expected) < {"fp32": 1e-5, "bf16": 0.02, "int8": 0.02, "fp8": 0.1}[kv_format]


def test_block_sizes_change_no_bit_of_floats(target: str, folders: dict[str, Path]) -> None:
    decoder, text = load_native(folders["mistral-window"], target=target), random_tokens(290, seed=6)
    expected = run_alone(decoder, text)
    for block_size in (1, 3, 7, 64, 256):
        assert torch.equal(run_alone(decoder, text, block_size=block_size), expected), block_size


def test_the_number_of_threads_changes_no_bit(target: str, folders: dict[str, Path]) -> None:
    text = random_tokens(120, seed=7)
    one, two, five = (
        run_alone(load_native(folders["llama"], "int4", threads, target=target), text, [50, 1, 1], kv_format="int8")
        for threads in (1, 2, 5)
    )
    assert torch.equal(one, two)
    assert torch.equal(one, five)


def test_a_models_nan_reaches_its_logits_and_nobody_elses(target: str, folders: dict[str, Path]) -> None:
    for level in LEVELS:
        decoder = load_native(folders["llama"], level, target=target)
        kv = make_cache(decoder, 4, 16, "int8" if level == "int4" else "fp32")
        step = Step([1, 2, 3, 4], [2, 2], [2, 18], [[0], [1, 2]], [0, 1, 2, 3])  # block 1 was never written: it holds NaN
        logits = decoder.forward(step, kv)
        assert logits[:2].isfinite().all(), level
        assert logits[2:].isnan().all(), level


def flat_config(**shape: int) -> ModelConfig:
    """One wide layer on top of nothing."""
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 1, "num_kv_heads": 1, "head_dim": 32, "vocab_size": 64, "max_position": 4096}
    flags = {"tied_embeddings": True, "attention_bias": False, "qk_norm": False, "sliding_window": None}
    return ModelConfig("llama", norm_epsilon=1e-5, rope=RopeConfig(), eos_token_ids=(), **sizes | shape, **flags)  # type: ignore[arg-type]


def make_decoder(config: ModelConfig, num_threads: int = 2) -> NativeDecoder:
    shapes = expected_shapes(config)
    return NativeDecoder(config, lambda name: torch.full(shapes[name], 0.01), "", "fp32", kernels(), num_threads)


@contextmanager
def memory_limit(headroom: int) -> Iterator[None]:
    """The process may map so many bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + headroom, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_step_that_finds_no_memory_is_an_error_and_the_next_one_is_computed() -> None:
    decoder = make_decoder(flat_config(intermediate_size=1 << 17))
    kv = make_cache(decoder, 64, 64)
    small = Step([1], [1], [1], [[0]], [0])
    expected = decoder.forward(small, kv)
    large = Step([1] * 2000, [2000], [2000], [range(64)], [0])  # 2,000 rows of 131,072 floats
    with memory_limit(256 << 20), pytest.raises(OSError, match="a step of 2000 tokens: Cannot allocate memory"):
        decoder.forward(large, kv)
    assert torch.equal(decoder.forward(small, kv), expected)


def test_threads_that_cannot_be_had_are_an_error() -> None:
    decoder = make_decoder(flat_config(intermediate_size=32), num_threads=300)
    kv = make_cache(decoder)
    with memory_limit(128 << 20), pytest.raises(OSError, match="300 threads of the CPU kernels: Resource temporarily unavailable"):
        decoder.bind(kv)  # their stacks don't fit
    assert decoder.forward(Step([1], [1], [1], [[0]], [0]), kv).isfinite().all()


def test_a_forked_child_starts_threads_of_its_own(folders: dict[str, Path]) -> None:
    decoder, text = load_native(folders["llama"]), random_tokens(20, seed=9)
    expected = run_alone(decoder, text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork don't go together: that is the point
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        equal = torch.equal(run_alone(decoder, text), expected)
        decoder.__del__()
        os._exit(0 if equal else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(run_alone(decoder, text), expected)


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
