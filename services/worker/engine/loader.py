"""Loads a model from a GGUF file or a Hugging Face folder: its config, its version, its weights at a level, by their Hugging Face names.

Every tensor is checked against the config before any is read; one that the decoder wouldn't use is refused, as the model would be another.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from services.worker.engine.config import ModelConfig, ModelFileError
from services.worker.engine.config_file import from_gguf, from_hugging_face
from services.worker.engine.gguf_file import GGUFFile
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.quantization import GROUP, Quantized, Weights, quantize
from services.worker.engine.safetensors_folder import SafetensorsFolder, read_json, weight_files

Built = TypeVar("Built")
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 64 << 20
_GGUF_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Source:
    """An open model: its config and its tensors by Hugging Face name."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: Callable[[str], int]
    read: Callable[[str], Tensor]
    bits: Callable[[str], int]  # of a stored weight, without its group's scale and offset
    read_quantized: Callable[[str], Quantized | None]  # as it is stored; None where that isn't in groups of 8 or 4 bits


def load(path: Path, *, level: str = "fp32", device: torch.device | str = "cpu", progress: Progress | None = None) -> Decoder:
    """The whole model in torch. Raises ModelFileError, with one line for a person, for anything wrong with it.

    Set torch's number of threads before: the shapes of products that keep a row's bits are found for that number.
    """
    return build(path, Decoder, level=level, device=device, progress=progress)


def build(
    path: Path,
    make: Callable[[ModelConfig, Weights, str], Built],
    *,
    level: str,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Built:
    """What `make` makes of (config, weights, version). Raises ModelFileError."""
    with open_model(path) as source:
        expected = expected_shapes(source.config)
        _check(source, expected)
        read = _reader(source, expected, level)
        total = sum(source.num_bytes(name) for name in expected)
        done = 0

        def weights(name: str) -> Tensor | Quantized:
            nonlocal done
            weight = read(name)
            done += source.num_bytes(name)
            if progress:
                progress(done, total)
            return weight.to(device)

        return make(source.config, weights, version(path))


def suggested_level(path: Path) -> str:
    """The cheapest level that keeps what the file says: int4 or int8 where its matrices are stored in so few bits, else bf16."""
    with open_model(path) as source:
        bits = min(source.bits(name) for name in expected_shapes(source.config) if _is_matrix(name) and name in source.shapes)
    return "int4" if bits <= 4 else "int8" if bits <= 8 else "bf16"


def _reader(source: Source, expected: Mapping[str, tuple[int, ...]], level: str) -> Weights:
    """Reads weights at a level. Norms and biases stay floats; at int4 embeddings and the head have 8 bits unless stored in fewer.

    In a file of 4-bit weights those with more bits are the ones that need them: they become 8-bit.
    """
    if level in ("fp32", "bf16"):
        dtype = torch.float32 if level == "fp32" else torch.bfloat16
        return lambda name: source.read(name).to(dtype)
    body = [name for name in expected if _is_matrix(name) and name.startswith("model.layers.")]
    has_four_bits = any(source.bits(name) <= 4 for name in body)

    def read(name: str) -> Tensor | Quantized:
        if not _is_matrix(name):
            return source.read(name).float()
        width = source.config.head_dim if name.endswith("o_proj.weight") else None
        small = level == "int4" and name in body and (not has_four_bits or source.bits(name) <= 4)
        stored = source.read_quantized(name) if width is None or width % GROUP == 0 else None
        if stored is not None and (not small if stored.offsets is None else level == "int4"):
            return stored if width is None else replace(stored, width=width)
        return quantize(source.read(name), "int4" if small else "int8", width)

    return read


def _is_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))


def read_config(path: Path) -> ModelConfig:
    """The model's shape, without its weights. Raises ModelFileError."""
    if path.is_dir():
        return _folder_config(path)
    with open_model(path) as source:
        return source.config


def version(path: Path) -> str:
    """16 hex characters that name these weights: a hash over every file's header and size and evenly spaced samples of its data."""
    digest = hashlib.sha256()
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
        for file in weight_files(path):
            with file.open("rb") as stream:
                _hash_file(digest.update, stream, 8 + int.from_bytes(stream.read(8), "little"))
    else:
        with GGUFFile(path) as gguf, path.open("rb") as stream:
            _hash_file(digest.update, stream, len(gguf.header))
    return digest.hexdigest()[:16]


def _hash_file(update: Callable[[bytes], None], stream: BinaryIO, header_bytes: int) -> None:
    size = stream.seek(0, 2)
    update(size.to_bytes(8, "little"))
    stream.seek(0)
    update(stream.read(min(header_bytes, _MAX_HEADER_BYTES)))
    for index in range(_NUM_SAMPLES):
        stream.seek(max(0, size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
        update(stream.read(_SAMPLE_BYTES))


@contextmanager
def open_model(path: Path) -> Iterator[Source]:
    """Open a GGUF file or a Hugging Face folder. Raises ModelFileError."""
    if path.is_dir():
        config = _folder_config(path)
        with SafetensorsFolder(path) as folder:
            # Old exports carry the rotary frequencies, which the config determines.
            shapes = {name: shape for name, shape in folder.shapes.items() if not name.endswith("rotary_emb.inv_freq")}
            yield Source(config, shapes, folder.num_bytes, folder.read, bits=lambda _: 16, read_quantized=lambda _: None)
        return
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such file or folder")
    with GGUFFile(path) as gguf:
        yield _gguf_source(gguf)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors that a decoder of this shape has, by Hugging Face name."""
    hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _check(source: Source, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in source.shapes:
            raise ModelFileError(f"tensor {name!r} is missing")
        if source.shapes[name] != shape:
            raise ModelFileError(f"tensor {name!r} has the shape {source.shapes[name]}; the configuration asks for {shape}")
    unknown = sorted(source.shapes.keys() - expected.keys() - {"lm_head.weight"})  # tied models may carry a copy of their head
    if unknown:
        raise ModelFileError(f"tensor {unknown[0]!r} isn't known for {source.config.architecture}: a feature that isn't served?")


def _folder_config(folder: Path) -> ModelConfig:
    generation = folder / "generation_config.json"
    return from_hugging_face(read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None)


def _gguf_source(gguf: GGUFFile) -> Source:
    if gguf.metadata.get("split.count", 1) not in (0, 1):
        raise ModelFileError(f"is one of {gguf.metadata['split.count']} parts of a model; join them with gguf-split --merge")
    infos = dict(gguf.tensors)
    factors = tuple(gguf.read("rope_freqs.weight").flatten().tolist()) if infos.pop("rope_freqs.weight", None) else ()
    config = from_gguf(gguf.metadata, {name: info.shape for name, info in infos.items()}, factors)
    names = {_hugging_face_name(name): name for name in infos}

    def read(name: str) -> Tensor:
        tensor = torch.from_numpy(gguf.read(names[name]))
        heads = _permuted_heads(name, config)
        return unpermute(tensor, heads) if heads else tensor

    def read_quantized(name: str) -> Quantized | None:
        quantized = gguf.read_quantized(names[name])
        heads = _permuted_heads(name, config)
        return quantized.rows(unpermute(torch.arange(len(quantized.values)), heads)) if quantized and heads else quantized

    return Source(
        config=config,
        shapes={name: infos[original].shape for name, original in names.items()},
        num_bytes=lambda name: infos[names[name]].num_bytes,
        read=read,
        bits=lambda name: _bits(infos[names[name]].kind.name),
        read_quantized=read_quantized,
    )


def _bits(kind: str) -> int:
    """Q4_1 -> 4, BF16 -> 16: the first number in the name of a GGUF type."""
    number = re.search(r"\d+", kind)
    assert number, kind
    return int(number[0])


def _permuted_heads(name: str, config: ModelConfig) -> int:
    """Heads whose outputs GGUF holds in another order; 0: none."""
    side = re.search(r"\.([qk])_proj\.", name)
    if not side or config.architecture != "llama":
        return 0
    return config.num_heads if side[1] == "q" else config.num_kv_heads


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; a name that isn't known stays as it is."""
    match = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _GGUF_LAYER:
        return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"
    return _GGUF_TOP.get(name, name)


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo what the conversion of a Llama to GGUF does to q and k: it interleaves the two halves of each head for llama.cpp's rotation."""
    head_dim = weight.shape[0] // num_heads
    return weight.view(num_heads, head_dim // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
