"""Reads a model's shape from what comes with its weights: GGUF metadata, or a Hugging Face config.json.

Every architecture or feature that the decoder can't compute is refused here by name, before a weight is read.
"""

import math
from collections.abc import Collection, Mapping

from services.worker.engine.config import ModelConfig, ModelFileError, RopeConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def from_hugging_face(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """The shape that a config.json describes. `generation` is generation_config.json, which may name more end-of-sequence tokens."""
    architecture = str(config.get("model_type"))
    if architecture not in ARCHITECTURES:
        raise ModelFileError(f"model_type {architecture!r} isn't served; known are {', '.join(ARCHITECTURES)}")
    for name in _strings(config.get("architectures")):
        if not name.endswith("ForCausalLM"):
            raise ModelFileError(f"architecture {name!r} isn't a language model (...ForCausalLM)")
    _refuse_features(config)
    num_heads, hidden_size = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // max(num_heads, 1)  # as in transformers
    max_position = integer(config, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=integer(config, "head_dim", default_head_dim),
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        max_position=max_position,
        norm_epsilon=number(config, "rms_norm_eps", 1e-6),
        rope=_hugging_face_rope(config, max_position),
        tied_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=_hugging_face_window(config, architecture),
        eos_token_ids=_token_ids(config.get("eos_token_id"), (generation or {}).get("eos_token_id")),
    )


def _refuse_features(config: Mapping[str, object]) -> None:
    """Refuse by name what a config.json can ask for and the decoder can't compute."""
    if config.get("quantization_config"):
        raise ModelFileError("quantization_config: quantised safetensors aren't served; use a GGUF file or unquantised weights")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFileError(f"hidden_act {activation!r} isn't served; known is 'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if config.get("model_type") != "qwen2" and flag(config, name):
            raise ModelFileError(f"{name} isn't served")
    partial = config.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise ModelFileError(f"partial_rotary_factor {partial!r} isn't served; known is 1")


def _hugging_face_window(config: Mapping[str, object], architecture: str) -> int | None:
    """One window for all layers, or None. Layers that differ are refused."""
    if architecture == "llama" or (architecture != "mistral" and not flag(config, "use_sliding_window")):
        return None
    if config.get("sliding_window", 4096) is None:
        return None
    window, num_layers = integer(config, "sliding_window", 4096), integer(config, "num_hidden_layers")
    if architecture == "mistral":
        return window
    # Qwen: only the layers from max_window_layers on have the window, unless layer_types says which.
    kinds = _strings(config.get("layer_types"))
    if not kinds:
        full = min(integer(config, "max_window_layers", 28), num_layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"}:
        return window
    raise ModelFileError(f"layer_types {sorted(set(kinds))} in one model aren't served; all layers must have the same attention")


def _hugging_face_rope(config: Mapping[str, object], max_position: int) -> RopeConfig:
    """From rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelFileError("rope parameters per kind of layer aren't served")
    theta = number(parameters, "rope_theta", number(config, "rope_theta", 10000.0))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if number(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelFileError("rope partial_rotary_factor isn't served; known is 1")
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelFileError(f"rope scaling {kind!r} isn't served; known are linear, llama3, yarn")
    for name in ("mscale", "mscale_all_dim"):
        if parameters.get(name):
            raise ModelFileError(f"rope scaling's {name} isn't served")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=number(parameters, "factor"),
        original_max_position=integer(parameters, "original_max_position_embeddings", max_position),
        low_freq_factor=number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=number(parameters, "high_freq_factor", 4.0),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        attention_factor=number(parameters, "attention_factor", 0.0) or None,
        truncate=flag(parameters, "truncate", True),
    )


def from_gguf(metadata: Mapping[str, object], tensors: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] = ()) -> ModelConfig:
    """The shape that GGUF metadata describes. `tensors` are names and shapes (rows first), `rope_factors` is rope_freqs.weight."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ("llama", "qwen2", "qwen3"):  # a Mistral's architecture is llama
        raise ModelFileError(f"general.architecture {architecture!r} isn't served; known are llama (Mistral too), qwen2, qwen3")
    fields = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    for name in ("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale", "attention.clamp_kqv"):
        if fields.get(name):
            raise ModelFileError(f"{architecture}.{name} isn't served")
    if not flag(fields, "attention.causal", True):
        raise ModelFileError(f"{architecture}.attention.causal must be true")
    num_heads, hidden_size = integer(fields, "attention.head_count"), integer(fields, "embedding_length")
    head_dim = integer(fields, "attention.key_length", hidden_size // max(num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if integer(fields, name, head_dim) != head_dim:
            raise ModelFileError(f"{architecture}.{name} is {fields[name]}; only {head_dim}, the length of a key, is served")
    eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        num_layers=integer(fields, "block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=integer(fields, "feed_forward_length"),
        vocab_size=tensors.get("token_embd.weight", (0,))[0],
        max_position=integer(fields, "context_length"),
        norm_epsilon=number(fields, "attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, architecture, rope_factors),
        tied_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=integer(fields, "attention.sliding_window", 0) or None,
        eos_token_ids=_token_ids(*eos),
    )


def _gguf_rope(fields: Mapping[str, object], architecture: str, factors: tuple[float, ...]) -> RopeConfig:
    theta = number(fields, "rope.freq_base", 10000.0)
    kind = str(fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none"))
    if kind not in ("none", "linear", "yarn"):
        raise ModelFileError(f"{architecture}.rope.scaling.type {kind!r} isn't served; known are none, linear, yarn")
    if factors:
        if kind != "none":
            raise ModelFileError(f"rope_freqs.weight together with rope scaling {kind!r} isn't served")
        return RopeConfig(theta, "factors", factors=factors)
    if kind == "none":
        return RopeConfig(theta)
    for name in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        if fields.get(f"rope.scaling.{name}") not in (None, 0, 1.0, -1.0):
            raise ModelFileError(f"{architecture}.rope.scaling.{name} isn't served")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=number(fields, "rope.scaling.factor", number(fields, "rope.scale_linear", 1.0)),
        original_max_position=integer(fields, "rope.scaling.original_context_length", integer(fields, "context_length")),
        beta_fast=number(fields, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number(fields, "rope.scaling.yarn_beta_slow", 1.0),
    )


def integer(fields: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A whole number, `default` where it is missing. ModelFileError names the field."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(f"{name} is {_short(value)}; it must be a whole number")
    return value


def number(fields: Mapping[str, object], name: str, default: float | None = None) -> float:
    """A finite number, `default` where it is missing. ModelFileError names the field."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelFileError(f"{name} is {_short(value)}; it must be a finite number")
    return float(value)


def flag(fields: Mapping[str, object], name: str, default: bool = False) -> bool:
    """true or false, `default` where it is missing. ModelFileError names the field."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFileError(f"{name} is {_short(value)}; it must be true or false")
    return value


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _token_ids(*values: object) -> tuple[int, ...]:
    """The distinct ids among ints, lists of ints and Nones, in order."""
    ids = [item for value in values for item in (value if isinstance(value, Collection) else [value])]
    return tuple(dict.fromkeys(item for item in ids if isinstance(item, int)))


def _short(value: object) -> str:
    return "missing" if value is None else repr(value)[:80]
