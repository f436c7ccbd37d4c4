"""Tiny random models for the engine's tests, made with transformers, and a plain way to drive a decoder: steps of chosen chunks."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from services.worker.engine.config import ModelConfig
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.kv_cache import KVCache
from services.worker.engine.loader import build, load
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.native import NativeDecoder
from services.worker.engine.models.step import Step
from services.worker.engine.quantization import Weights
from tools import build_kernels

VOCAB = 199  # odd on purpose: no vector of any width divides it
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama-tied": LlamaConfig(**_SHAPE | {"num_key_value_heads": 6}, tie_word_embeddings=True),
    "llama-one-kv-head": LlamaConfig(**_SHAPE | {"num_key_value_heads": 1}),
    "llama3-rope": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "linear-rope": LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
    "yarn-rope": LlamaConfig(**_SHAPE, rope_parameters=_YARN),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None, head_dim=16),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=37),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=20),
}


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model whose every weight matters: norms and biases, too, are away from 1 and 0."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def save_model(name: str, folder: Path) -> PreTrainedModel:
    """Make one of CONFIGS and write it to `folder` as a hub's would lie there."""
    model = make_model(CONFIGS[name])
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[num_tokens, vocab] by transformers."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


@dataclass(frozen=True)
class Chunk:
    """The tokens [start, stop) of a text, whose keys and values live in the blocks of `table`."""

    tokens: Sequence[int]
    start: int
    stop: int
    table: Sequence[int]


AnyDecoder = Decoder | NativeDecoder


@lru_cache
def kernels(target: str = "native") -> library.Library:
    """The CPU kernels for a target of build_kernels.py, compiled where they aren't yet; or those in the folder FOREBAY_TEST_KERNELS."""
    if folder := os.environ.get("FOREBAY_TEST_KERNELS"):
        return library.load(Path(folder) / f"forebay-{target}-sanitized.so")
    return library.load(build_kernels.build(target))


def load_native(path: Path, level: str = "fp32", num_threads: int = 2, target: str = "native") -> NativeDecoder:
    """The model on the CPU kernels."""
    compiled = kernels(target)

    def make(config: ModelConfig, weights: Weights, version: str) -> NativeDecoder:
        return NativeDecoder(config, weights, version, level, compiled, num_threads)

    return build(path, make, level=level)


def load_every_way(path: Path) -> Iterator[Callable[[], AnyDecoder]]:
    """Loads of a file, each of which must refuse a bad one: as floats, and as integers for torch and for the kernels."""
    yield lambda: load(path)
    yield lambda: load(path, level="int4")
    yield lambda: load_native(path, "int4", num_threads=1)


def make_cache(decoder: AnyDecoder, num_blocks: int = 64, block_size: int = 16, kv_format: str | None = None) -> KVCache | NativeCache:
    """A cache full of NaN: nothing that wasn't written may be read. By default in the format that the decoder computes in."""
    if isinstance(decoder, NativeDecoder):
        native = NativeCache(decoder.config, num_blocks, block_size, kv_format or "fp32")
        poison(native)
        return native
    kv = KVCache(decoder.config, num_blocks, block_size, kv_format or {torch.float32: "fp32"}.get(decoder.dtype, "bf16"), decoder.device)
    poison(kv)
    return kv


def poison(kv: KVCache | NativeCache, block: int | None = None) -> None:
    """NaN in all blocks, or in one."""
    pages = kv.pages if block is None else kv.pages[block]
    pages.view(torch.uint8).fill_(0xFF)  # all bits set are a NaN in floats and in the scales of 8-bit formats
    if isinstance(kv, KVCache) and kv.scales is not None:
        (kv.scales if block is None else kv.scales[block]).fill_(float("nan"))


def run_step(decoder: AnyDecoder, kv: KVCache | NativeCache, chunks: Sequence[Chunk]) -> list[Tensor]:
    """One step; the logits [num_tokens, vocab] of every token of each chunk."""
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    step = Step(
        tokens=[token for chunk in chunks for token in chunk.tokens[chunk.start : chunk.stop]],
        query_lengths=lengths,
        context_lengths=[chunk.stop for chunk in chunks],
        block_tables=[chunk.table for chunk in chunks],
        logit_rows=range(sum(lengths)),
    )
    return list(decoder.forward(step, kv).split(lengths))  # type: ignore[arg-type]


def run_alone(
    decoder: AnyDecoder, tokens: Sequence[int], sizes: Sequence[int] = (), block_size: int = 16, kv_format: str | None = None
) -> Tensor:
    """Logits [num_tokens, vocab] of a text in an engine of its own, in chunks of `sizes` and then the rest."""
    num_blocks = -(-len(tokens) // block_size)
    kv, table = make_cache(decoder, num_blocks, block_size, kv_format), range(num_blocks)
    out, start = [], 0
    for size in [*sizes, len(tokens)]:
        stop = min(start + size, len(tokens))
        if stop > start:
            out += run_step(decoder, kv, [Chunk(tokens, start, stop, table)])
        start = stop
    return torch.cat(out)


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def run_together(
    decoder: AnyDecoder, texts: list[list[int]], rng: random.Random, block_size: int = 16, kv_format: str | None = None
) -> list[Tensor]:
    """Logits of every text when they advance by random chunks, some or all of them in a step, on scattered blocks."""
    counts = [-(-len(text) // block_size) for text in texts]
    kv = make_cache(decoder, sum(counts), block_size, kv_format)
    blocks = list(range(sum(counts)))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    done = [0] * len(texts)
    logits: list[list[Tensor]] = [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        going = [i for i in range(len(texts)) if done[i] < len(texts[i]) and rng.random() < 0.8]
        rng.shuffle(going)
        chunks = [Chunk(texts[i], done[i], min(len(texts[i]), done[i] + rng.choice([1, 1, 1, 2, 5, 17, 130])), tables[i]) for i in going]
        if not chunks:
            continue
        for i, chunk, rows in zip(going, chunks, run_step(decoder, kv, chunks), strict=True):
            logits[i].append(rows)
            done[i] = chunk.stop
    return [torch.cat(rows) for rows in logits]


GGUF_TYPES = {
    "F64", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
}  # fmt: skip
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    extra: dict[str, int | float | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kinds: dict[str, str] | None = None,
) -> None:
    """Write a model as GGUF, its matrices in type `kind`, and set the model's own weights to what the file's come to.

    `kinds` are other types by a part of a matrix's Hugging Face name.
    Types that the gguf package can't quantise get random blocks of sane size.
    """
    writer = gguf.GGUFWriter(path, _architecture(model.config))
    _add_metadata(writer, model.config, extra or {})
    for name, weight in model.named_parameters():
        if model.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        quantised = next((k for part, k in (kinds or {}).items() if part in name), kind) if weight.dim() == 2 else "F32"
        raw, values = _stored(name, weight.detach().numpy(), model.config, gguf.GGMLQuantizationType[quantised])
        with torch.no_grad():
            weight.copy_(torch.from_numpy(values))
        for theirs, ours in _GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[quantised])
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(config: PreTrainedConfig) -> str:
    return "llama" if config.model_type == "mistral" else config.model_type


def _add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig, extra: dict[str, int | float | str]) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token-{i}" for i in range(config.vocab_size)])
    writer.add_array("test.numbers", [1, 2, 3])
    for key, value in extra.items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)


def _stored(name: str, values: np.ndarray, config: PreTrainedConfig, kind: gguf.GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """(raw, what it comes to in fp32): the heads of a Llama's q and k are interleaved in the file, as llama.cpp's conversion does."""
    heads = (
        {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name[name.find("_proj") - 1], 0) if "_proj" in name else 0
    )
    if _architecture(config) != "llama" or not heads:
        return _quantise(np.ascontiguousarray(values), kind)
    shape, half = values.shape, values.shape[0] // heads // 2
    raw, stored = _quantise(np.ascontiguousarray(values.reshape(heads, 2, half, *shape[1:]).swapaxes(1, 2).reshape(shape)), kind)
    return raw, np.ascontiguousarray(stored.reshape(heads, half, 2, *shape[1:]).swapaxes(1, 2).reshape(shape))


def _quantise(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """(raw, what it comes to in fp32)"""
    if kind is gguf.GGMLQuantizationType.F64:
        return values.astype(np.float64), values
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        raw = _random_blocks(values.shape, kind)
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(values.shape)


def _random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random bytes, of which the blocks that come to finite values of at most 1 are kept."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, width = shape
    rng, kept, count = np.random.default_rng(kind.value), np.empty((0, block_bytes), np.uint8), rows * width // block_size
    while len(kept) < count:
        blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(blocks, kind)
        kept = np.concatenate([kept, blocks[(np.abs(values) <= 1).all(-1)]])
    return kept[:count].reshape(rows, width // block_size * block_bytes)
