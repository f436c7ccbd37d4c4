"""What a config.json may say: each known feature read, each unknown one refused by name."""

import math

import pytest

from services.worker.engine.config import ModelConfig, ModelFileError
from services.worker.engine.config_file import from_hugging_face

BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def read(**changes: object) -> ModelConfig:
    return from_hugging_face(BASE | changes)


def test_defaults() -> None:
    config = read()
    assert (config.head_dim, config.group_size, config.rope.theta, config.rope.kind) == (16, 2, 10000.0, "none")
    assert (config.tied_embeddings, config.attention_bias, config.qk_norm, config.sliding_window) == (False, False, False, None)
    assert config.kv_bytes_per_token(4) == 4 * 2 * 2 * 16 * 4


def test_flags_of_each_architecture() -> None:
    assert read(model_type="qwen2").attention_bias
    assert read(model_type="qwen3").qk_norm
    assert read(model_type="qwen3").head_dim == 128
    assert read(model_type="qwen3", head_dim=32).head_dim == 32


def test_end_tokens_come_from_both_files() -> None:
    assert from_hugging_face(BASE, {"eos_token_id": [7, 2, 9]}).eos_token_ids == (2, 7, 9)
    assert from_hugging_face(BASE | {"eos_token_id": None}, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral"}, 4096),  # as transformers does
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 37}, 37),
        ({"model_type": "llama", "sliding_window": 37}, None),
        ({"model_type": "qwen2", "sliding_window": 37}, None),
        ({"model_type": "qwen2", "sliding_window": 37, "use_sliding_window": True, "max_window_layers": 4}, None),
        ({"model_type": "qwen2", "sliding_window": 37, "use_sliding_window": True, "max_window_layers": 0}, 37),
        ({"model_type": "qwen3", "sliding_window": 37, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 37),
    ],
)
def test_sliding_windows(changes: dict[str, object], window: int | None) -> None:
    assert read(**changes).sliding_window == window


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_before_and_since_transformers_5(key: str) -> None:
    old = read(rope_theta=5e5, rope_scaling={key: "llama3", **_LLAMA3})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3})
    assert old.rope == new.rope
    assert (new.rope.kind, new.rope.theta, new.rope.factor, new.rope.original_max_position) == ("llama3", 5e5, 8.0, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, "'gemma3'"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **_LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, "layer_types"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim (15) must be even"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [name for name in BASE if name.startswith(("hidden", "inter", "num", "vocab", "max", "rms"))])
@pytest.mark.parametrize("value", [0, -1, 1 << 63, math.inf, math.nan, "64", [], True])
def test_hostile_numbers_are_refused(name: str, value: object) -> None:
    if name == "rms_norm_eps" and value == 1 << 63:
        return  # a number like another
    with pytest.raises(ModelFileError):
        read(**{name: value})
