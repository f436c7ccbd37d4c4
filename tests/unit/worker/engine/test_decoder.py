"""The decoder against transformers, and against itself: alone, in chunks, in company."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.worker.engine.loader import load
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.step import Step
from tests.tiny_models import (
    CONFIGS,
    VOCAB,
    Chunk,
    make_cache,
    random_tokens,
    reference_logits,
    run_alone,
    run_step,
    run_together,
    save_model,
)

Pair = tuple[PreTrainedModel, Decoder]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """(transformers' model, ours from its files) by name, made once."""

    @cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        return save_model(name, folder), load(folder)

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, make_pair: Callable[[str], Pair]) -> None:
    model, decoder = make_pair(name)
    tokens = random_tokens(300, seed=1)
    torch.testing.assert_close(run_alone(decoder, tokens), reference_logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [16, 7, 48])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, block_size: int, make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair(name)
    rng = random.Random(f"{name}{block_size}")
    texts = [random_tokens(rng.choice([1, 3, 20, 90, 260, 300]), seed) for seed in range(9)]
    for text, logits in zip(texts, run_together(decoder, texts, rng, block_size), strict=True):
        assert torch.equal(logits, run_alone(decoder, text))


@pytest.mark.parametrize("name", ["llama3-rope", "mistral-window", "qwen2", "qwen3"])
def test_greedy_ids_are_those_of_transformers(name: str, make_pair: Callable[[str], Pair]) -> None:
    model, decoder = make_pair(name)
    prompt = torch.tensor([random_tokens(12, seed=2)])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False, eos_token_id=None)
    tokens, kv, table = prompt[0].tolist(), make_cache(decoder), range(64)
    start = 0
    while len(tokens) < 212:
        (logits,) = run_step(decoder, kv, [Chunk(tokens, start, len(tokens), table)])
        start = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    assert tokens == expected[0].tolist()


def test_sequences_share_the_blocks_of_a_prefix(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("llama")
    prefix = random_tokens(48, seed=3)
    texts = [prefix + random_tokens(30 + i, seed=4 + i) for i in range(3)]
    kv = make_cache(decoder)
    run_step(decoder, kv, [Chunk(prefix, 0, 48, [5, 6, 7])])
    tables = [[5, 6, 7, 10 + 3 * i, 11 + 3 * i, 12 + 3 * i] for i in range(3)]
    together = run_step(decoder, kv, [Chunk(text, 48, len(text), table) for text, table in zip(texts, tables, strict=True)])
    for text, logits in zip(texts, together, strict=True):
        assert torch.equal(logits, run_alone(decoder, text)[48:])


def test_a_sequence_that_turned_to_nan_leaves_others_alone(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("mistral-window")
    text = random_tokens(70, seed=8)
    kv = make_cache(decoder)  # block 0 .. 4 hold NaN as another's would
    _, logits = run_step(decoder, kv, [Chunk([1, 2], 1, 2, [0]), Chunk(text, 0, 70, range(10, 15))])
    assert torch.equal(logits, run_alone(decoder, text))


def test_only_the_rows_asked_for_get_logits(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("qwen3")
    kv = make_cache(decoder)
    step = Step(range(5), [5], [5], [[0]], logit_rows=[])
    assert decoder.forward(step, kv).shape == (0, VOCAB)
    assert decoder.forward(replace(step, logit_rows=[4, 1]), kv).shape == (2, VOCAB)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bf16_is_near_fp32_and_batch_invariant_too(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    rounded = save_model(name, tmp_path).to(torch.bfloat16)
    decoder = load(tmp_path, level="bf16")
    texts = [random_tokens(40 + i, seed=i) for i in range(5)]
    together = run_together(decoder, texts, random.Random(5))
    for text, logits in zip(texts, together, strict=True):
        assert logits.dtype == torch.float32
        assert torch.equal(logits, run_alone(decoder, text))
        expected = reference_logits(model, text)
        theirs = reference_logits(rounded, text).float()
        assert (logits - expected).norm() < 1.3 * (theirs - expected).norm()
