"""Loads an encoder from a sentence-transformers folder: its shape, how vectors are pooled and normalised, its version, its weights.

What the encoder doesn't compute is refused by name, and every tensor is checked against the shape before any is read.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from services.worker.engine.config import ModelFileError
from services.worker.engine.config_file import flag, integer, number
from services.worker.engine.encoder_config import Activation, EncoderConfig, Pooling
from services.worker.engine.loader import Progress, version
from services.worker.engine.models.bert import Bert
from services.worker.engine.safetensors_folder import SafetensorsFolder, read_json, read_json_list

MODEL_TYPES = ("bert",)
_KINDS = ("Transformer", "Pooling", "Normalize")
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_MODES = {"cls_token": Pooling.CLS, "mean_tokens": Pooling.MEAN, "max_tokens": Pooling.MAX}
_UNUSED = frozenset(
    prefix + name for prefix in ("", "bert.") for name in ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
)
"""Tensors that a folder may have and no vector depends on: the head of another task, and numbers in order."""


def is_encoder(path: Path) -> bool:
    """Whether a folder holds an encoder, by the architectures in its config.json. A file never does. Raises ModelFileError."""
    if not path.is_dir():
        return False
    return read_json(path / "config.json").get("architectures") == ["BertModel"]


def read_encoder(folder: Path) -> EncoderConfig:
    """The encoder's shape, without its weights. Raises ModelFileError."""
    config = read_json(folder / "config.json")
    _refuse_features(folder, config)
    pooling, normalize = _modules(folder)
    sentences = _optional(folder / "sentence_bert_config.json")
    max_position = integer(config, "max_position_embeddings")
    return EncoderConfig(
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=integer(config, "hidden_size"),
        num_heads=integer(config, "num_attention_heads"),
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        max_position=max_position,
        num_token_types=integer(config, "type_vocab_size", 2),
        norm_epsilon=number(config, "layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS[str(config.get("hidden_act", "gelu"))],
        pooling=pooling,
        normalize=normalize,
        max_input_len=integer(sentences, "max_seq_length", max_position) if sentences.get("max_seq_length") is not None else max_position,
    )


def _refuse_features(folder: Path, config: Mapping[str, object]) -> None:
    if config.get("model_type") not in MODEL_TYPES or config.get("architectures") != ["BertModel"]:
        kind = f"{config.get('model_type')!r} with architectures {config.get('architectures')!r}"
        raise ModelFileError(f"model_type {kind} isn't served as an encoder; known is 'bert' with ['BertModel']")
    if config.get("hidden_act", "gelu") not in _ACTIVATIONS:
        raise ModelFileError(f"hidden_act {config.get('hidden_act')!r} isn't served; known are {', '.join(_ACTIVATIONS)}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelFileError(f"position_embedding_type {config.get('position_embedding_type')!r} isn't served; known is 'absolute'")
    for name in ("is_decoder", "add_cross_attention"):
        if flag(config, name):
            raise ModelFileError(f"{name} isn't served")
    if config.get("quantization_config"):
        raise ModelFileError("quantization_config: quantised safetensors aren't served")
    prompt = _optional(folder / "config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        raise ModelFileError(f"default_prompt_name {prompt!r} isn't served: texts are embedded as they come")


def _modules(folder: Path) -> tuple[Pooling, bool]:
    """How states become a vector, and whether that is normalised, from modules.json: Transformer, Pooling and perhaps Normalize."""
    kinds: list[str] = []
    pooling = Pooling.MEAN
    for module in read_json_list(folder / "modules.json"):
        if not isinstance(module, Mapping) or not isinstance(module.get("type"), str) or not isinstance(module.get("path"), str):
            raise ModelFileError("modules.json: each entry must be an object with type and path")
        kind, place = module["type"].rpartition(".")[2], module["path"]
        if kind not in _KINDS:
            raise ModelFileError(f"modules.json: {kind!r} isn't served; known are {', '.join(_KINDS)}")
        if kind == "Pooling":
            if place in ("", ".", "..") or Path(place).name != place:
                raise ModelFileError(f"modules.json: {place!r} isn't a folder right inside this one")
            pooling = _pooling(folder / place)
        elif kind == "Transformer" and place not in ("", "."):
            raise ModelFileError(f"modules.json: weights in {place!r} aren't served; they must lie beside config.json")
        kinds.append(kind)
    if kinds not in (["Transformer", "Pooling"], list(_KINDS)):
        raise ModelFileError(f"modules.json: {', '.join(kinds) or 'nothing'} in this order isn't served; known is {', '.join(_KINDS)}")
    return pooling, kinds[-1] == "Normalize"


def _pooling(folder: Path) -> Pooling:
    config = read_json(folder / "config.json")
    modes = [name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelFileError(f"pooling by {', '.join(modes) or 'nothing'} isn't served; known is one of {', '.join(_MODES)}")
    return _MODES[modes[0]]


def _optional(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def load_encoder(folder: Path, *, device: str = "cpu", progress: Progress | None = None) -> tuple[Bert, str]:
    """The encoder in fp32, and its version. Raises ModelFileError, with one line for a person, for anything wrong with it."""
    config = read_encoder(folder)
    expected = expected_shapes(config)
    with SafetensorsFolder(folder, _UNUSED) as file:
        names = {name.removeprefix("bert."): name for name in file.shapes}
        _check({name: file.shapes[original] for name, original in names.items()}, expected)
        read = _counting(lambda name: file.read(names[name]), lambda name: file.num_bytes(names[name]), expected, progress)
        return Bert(config, lambda name: read(name).float().to(device)), encoder_version(folder)


def _counting(
    read: Callable[[str], Tensor], num_bytes: Callable[[str], int], expected: Mapping[str, object], progress: Progress | None
) -> Callable[[str], Tensor]:
    total, done = sum(map(num_bytes, expected)), 0

    def counted(name: str) -> Tensor:
        nonlocal done
        weight = read(name)
        done += num_bytes(name)
        if progress:
            progress(done, total)
        return weight

    return counted


def encoder_version(folder: Path) -> str:
    """16 hex characters that name the weights and what else a vector depends on: pooling, normalisation, longest input."""
    config = read_encoder(folder)
    text = f"{version(folder)}/{config.pooling}/{config.normalize}/{config.max_input_len}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expected_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """All tensors that an encoder of this shape has, by Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position, hidden),
        "embeddings.token_type_embeddings.weight": (config.num_token_types, hidden),
        **_affine("embeddings.LayerNorm", (hidden,)),
    }
    for index in range(config.num_layers):
        prefix = f"encoder.layer.{index}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= _affine(f"{prefix}.{name}", (hidden, hidden))
        shapes |= _affine(f"{prefix}.intermediate.dense", (inner, hidden))
        shapes |= _affine(f"{prefix}.output.dense", (hidden, inner))
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= _affine(f"{prefix}.{name}", (hidden,))
    return shapes


def _affine(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _check(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in shapes:
            raise ModelFileError(f"tensor {name!r} is missing")
        if shapes[name] != shape:
            raise ModelFileError(f"tensor {name!r} has the shape {shapes[name]}; the configuration asks for {shape}")
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise ModelFileError(f"tensor {unknown[0]!r} isn't known for an encoder: a feature that isn't served?")
