"""Speculation on real decoders: greedy and seeded tokens are the same with every drafter, number of drafts and company.

FOREBAY_LOSSLESS_TOKENS sets how many tokens are compared (make speculation-lossless: 100,000).
"""

import os
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from services.worker.engine.config import EngineConfig, ModelConfig, Verification
from services.worker.engine.engine import Engine
from services.worker.engine.loader import build, load
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.quantization import Weights, tensor
from services.worker.engine.request import EngineRequest, SamplingParams, TokenOutput
from services.worker.engine.sampler import Peaks, distribution
from tests import engine_harness
from tests.engine_harness import Key, run
from tests.tiny_models import VOCAB, AnyDecoder, load_native, make_cache, poison, save_model

NUM_TOKENS = int(os.environ.get("FOREBAY_LOSSLESS_TOKENS", "4000"))
ARCHITECTURES = ["llama3-rope", "mistral-window", "qwen2", "qwen3"]
Models = Callable[[str], tuple[AnyDecoder, AnyDecoder]]
engine_on = partial(engine_harness.engine_on, eos_token_ids=(), num_blocks=256, max_step_tokens=256)


@pytest.fixture(scope="module", params=["torch", "native"])
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Models:
    """(a model, one that drafts for it) by name, made once: a copy that is a little off in torch, int4 for bf16 on the kernels."""

    @cache
    def make(name: str) -> tuple[AnyDecoder, AnyDecoder]:
        folder = tmp_path_factory.mktemp(name)
        save_model(name, folder)
        if request.param == "native":
            return load_native(folder, "bf16"), load_native(folder, "int4")
        return load(folder), perturbed(folder)

    return make


def perturbed(folder: Path, *, noise: float = 0.02, head: float = 1.0) -> Decoder:
    """As a lower level of the same weights would be. `head` scales the logits: a random model is too sure of itself to sample from."""
    generator = torch.Generator().manual_seed(1)

    def make(config: ModelConfig, weights: Weights, version: str) -> Decoder:
        def changed(name: str) -> torch.Tensor:
            weight = tensor(weights(name))
            return (weight + torch.randn(weight.shape, generator=generator) * noise) * (head if name == "lm_head.weight" else 1)

        return Decoder(config, changed, version)

    return build(folder, make, level="fp32")


def plain(whole: dict[Key, TokenOutput]) -> dict[Key, tuple[list[int], object]]:
    """What must be the same with and without: all that a client sees."""
    return {key: (o.token_ids, (o.logprobs, o.finish_reason, o.error)) for key, o in whole.items()}


def some_requests(seed: int, count: int, max_tokens: int) -> list[EngineRequest]:
    """Greedy ones, which soon repeat themselves, and sampled ones of every kind; prompts that share a beginning or repeat."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    requests = []
    for index in range(count):
        motif = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
        text = rng.choice([motif * 4, shared + motif, motif + shared[: rng.randint(1, 40)] + motif])
        sampling = SamplingParams(
            max_tokens=rng.randint(1, max_tokens),
            min_tokens=rng.choice([0, 1]),
            temperature=rng.choice([0, 0, 0.2, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.95]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0, 0.3]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), 3)) if rng.random() < 0.3 else (),
            logprobs=rng.choice([None, 1]),
            seed=rng.getrandbits(40),
        )
        requests.append(EngineRequest(f"r{index}", text, sampling, n=rng.choice([1, 1, 1, 3])))
    return requests


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.timeout(3600)
def test_b02_lossless_for_every_k_in_mixed_batches(name: str, models: Models) -> None:
    """Tokens, log-probabilities and ends, bit for bit: with lookups and a draft model, on roomy and on tight caches, cold and warm."""
    target, draft = models(name)
    accepted = compared = round_ = 0
    while compared < NUM_TOKENS // len(ARCHITECTURES):
        requests = some_requests(round_, 12, 120)
        expected = plain(run(engine_on(target), requests))
        max_drafts = (1, 3, 5, 8)[round_ % 4]
        lookups = engine_on(target, None, max_drafts)
        assert plain(run(lookups, requests)) == expected
        assert plain(run(lookups, requests)) == expected, "on a warm prefix cache"
        model = engine_on(target, draft, max_drafts, num_blocks=40, block_size=8, max_step_tokens=23)
        assert plain(run(model, requests)) == expected, "on a cache too small for all, in small steps"
        accepted += lookups.stats().num_accepted_tokens + model.stats().num_accepted_tokens
        compared += 3 * sum(len(output[0]) for output in expected.values())
        round_ += 1
    assert accepted > compared * 0.03


@pytest.mark.parametrize("max_drafts", [1, 3, 5, 8])
def test_a_hundred_greedy_prompts_with_everything_set(max_drafts: int, models: Models) -> None:
    """B02's own words: temperature 0, top_p .95, logprobs 1, stop_token_ids, 100 prompts."""
    target, _ = models("llama3-rope")
    rng = random.Random(max_drafts)
    requests = [
        EngineRequest(
            f"r{index}",
            [rng.randrange(VOCAB) for _ in range(4)] * 3,
            SamplingParams(max_tokens=16, temperature=0, top_p=0.95, logprobs=1, stop_token_ids=(index, index + 50)),
        )
        for index in range(100)
    ]
    expected = run(engine_on(target), requests)
    engine = engine_on(target, None, max_drafts)
    assert plain(run(engine, requests)) == plain(expected)
    assert engine.stats().num_accepted_tokens > 0


def test_a_model_that_drafts_for_itself_is_always_right(models: Models) -> None:
    """Seeded as well as greedy, as both draw with the same noise: k + 1 tokens a step."""
    target, _ = models("qwen3")
    requests = [EngineRequest(f"r{t}", [1, 2, 3], SamplingParams(max_tokens=61, temperature=t, seed=5)) for t in (0, 0.5, 1.0)]
    expected = plain(run(engine_on(target), requests))
    engine = engine_on(target, target, 5)
    assert plain(run(engine, requests)) == expected
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 3 * 50


def test_a_draft_model_that_is_a_little_off_is_often_right(models: Models) -> None:
    target, draft = models("llama3-rope")
    requests = [EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=200, seed=5))]
    engine = engine_on(target, draft, 3)
    assert plain(run(engine, requests)) == plain(run(engine_on(target), requests))
    stats = engine.stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 1


def test_f18_numbers_that_are_none_fail_their_request_alone(models: Models) -> None:
    target, _ = models("qwen2")
    engine = engine_on(target, target, 4)
    others = [EngineRequest(f"r{i}", [i, 2, 3] * 5, SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    expected = plain(run(engine_on(target), others))
    engine.add(EngineRequest("bad", list(range(40)), SamplingParams(max_tokens=30, seed=1)))
    engine.step(0.0)
    (sequence,) = engine.batcher.queue.running
    assert isinstance(engine.runner, ModelRunner)
    poison(engine.runner.kv, sequence.block_table[0])
    got = plain(run(engine, others))
    assert "logits" in str(got.pop(("bad", 0))[1])
    assert got == expected


# --- the rejection rule


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_b01_tokens_drafted_by_another_model_are_distributed_as_without(temperature: float, tmp_path: Path) -> None:
    """The second and third token of many requests, top_p .8, against the model's own distribution behind what came before."""
    save_model("llama3-rope", tmp_path)
    target, draft = perturbed(tmp_path, noise=0, head=0.1), perturbed(tmp_path, head=0.1)
    sampling = SamplingParams(
        max_tokens=3, temperature=temperature, top_p=0.8, logit_bias=dict.fromkeys((3, 5, 7, 9, 11), 8 + 4 * temperature)
    )
    engine = engine_on(target, draft, 2, verification=Verification.REJECTION, num_blocks=1024, max_sequences=256, max_step_tokens=1024)
    requests = [EngineRequest(f"r{seed}", [1, 2, 3], SamplingParams(**{**vars(sampling), "seed": seed})) for seed in range(3000)]
    texts = [output.token_ids for output in run(engine, requests).values()]
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for place in (1, 2):
        statistic, freedom = 0.0, 0
        for before in {tuple(text[:place]) for text in texts}:
            followers = [text[place] for text in texts if tuple(text[:place]) == before]
            if len(followers) < 200:
                continue
            expected = next_distribution(target, [1, 2, 3, *before], sampling) * len(followers)
            counts = torch.bincount(torch.tensor(followers), minlength=VOCAB).double()
            assert not counts[expected == 0].any(), "a token that top-p has cut"
            common = expected >= 5
            rest = torch.stack([counts[~common].sum(), expected[~common].sum()])
            statistic += float(((counts[common] - expected[common]) ** 2 / expected[common]).sum())
            statistic += float((rest[0] - rest[1]) ** 2 / rest[1]) if rest[1] > 0 else 0.0
            freedom += int(common.sum()) - (0 if rest[1] > 0 else 1)
        assert freedom > 0
        assert torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()) > 0.01


def next_distribution(model: AnyDecoder, tokens: list[int], sampling: SamplingParams) -> torch.Tensor:
    """[vocab] fp64, of the token behind `tokens`, as plain sampling draws it."""
    seen: list[torch.Tensor] = []

    class Spy:
        def __init__(self, spans: list[object]) -> None:
            self._spans = spans

        def choose(self, logits: torch.Tensor, peaks: Peaks, rows: list[object]) -> list[int]:
            seen.append(distribution(logits, peaks.logits, rows))  # type: ignore[arg-type]
            return logits.argmax(-1).tolist()

        def annotate(self, results: object) -> None: ...

    engine = Engine(ModelRunner(model, make_cache(model, 8), rule=Spy), EngineConfig(num_blocks=8), vocab_size=VOCAB)  # type: ignore[arg-type]
    run(engine, [EngineRequest("r", tokens, SamplingParams(**{**vars(sampling), "max_tokens": 1, "seed": 0}))])
    return seen[0][0].double()


def test_the_rejection_rule_is_reproducible_and_greedy_under_it_is_lossless(models: Models) -> None:
    target, draft = models("qwen3")
    sampled = [EngineRequest(f"r{i}", [i, 2, 3] * 4, SamplingParams(max_tokens=40, seed=i)) for i in range(6)]
    greedy = [EngineRequest(f"g{i}", [i, 2, 3] * 4, SamplingParams(max_tokens=40, temperature=0)) for i in range(6)]
    first = plain(run(engine_on(target, draft, 4, verification=Verification.REJECTION), sampled + greedy))
    again = plain(run(engine_on(target, draft, 4, verification=Verification.REJECTION), sampled + greedy))
    assert first == again
    expected = plain(run(engine_on(target), greedy))
    assert {key: value for key, value in first.items() if key in expected} == expected
    without = plain(run(engine_on(target, verification=Verification.REJECTION), sampled))
    assert without == plain(run(engine_on(target), sampled)), "with no draft, both rules draw alike"
