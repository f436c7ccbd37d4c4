"""Which tensors of which file get how many bits at a level, and whether they keep the file's own values."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from services.worker.engine.config import ModelConfig
from services.worker.engine.loader import build, expected_shapes, suggested_level
from services.worker.engine.quantization import Quantized, Weights
from tests.tiny_models import GGUF_TYPES, make_model, write_gguf

SHAPE = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA = LlamaConfig(**SHAPE)
BODY = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
ENDS = ["embed_tokens", "lm_head"]


def read(path: Path, level: str) -> dict[str, Tensor | Quantized]:
    """All weights at a level, by name."""

    def make(config: ModelConfig, weights: Weights, _: str) -> dict[str, Tensor | Quantized]:
        return {name: weights(name) for name in expected_shapes(config)}

    return build(path, make, level=level)


def bits(weight: Tensor | Quantized) -> int:
    if isinstance(weight, Tensor):
        return weight.element_size() * 8
    return 8 if weight.offsets is None else 4


def check(weights: dict[str, Tensor | Quantized], expected: dict[str, int]) -> None:
    """`expected` bits by a part of a name; all others are norms and biases in fp32."""
    for name, weight in weights.items():
        assert bits(weight) == next((count for part, count in expected.items() if part in name), 32), name


def distance(weights: dict[str, Tensor | Quantized], model: PreTrainedModel, part: str) -> float:
    """The largest error of the weights whose name has `part`, in parts of the largest weight."""
    largest = 0.0
    for name, weight in weights.items():
        if part in name:
            ours = weight.dequantize() if isinstance(weight, Quantized) else weight.float()
            theirs = model.get_parameter(name).detach()
            largest = max(largest, float((ours - theirs).abs().max() / theirs.abs().max()))
    return largest


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_4_bit_file_keeps_its_4_and_8_bit_values_and_gives_8_bits_to_what_has_more(kind: str, tmp_path: Path) -> None:
    model, path = make_model(LLAMA), tmp_path / "model.gguf"
    write_gguf(path, model, kind, kinds={"down_proj": "Q6_K", "v_proj": "Q8_0", "lm_head": "Q6_K"})
    weights = read(path, "int4")
    check(weights, dict.fromkeys([*BODY, *ENDS], 4) | dict.fromkeys(["v_proj", "down_proj", "lm_head"], 8))
    # Llama's q and k are stored in another order of rows.
    for part in ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "embed_tokens"):
        assert distance(weights, model, part) <= (1e-3 if kind == "Q4_K" else 0), part
    assert distance(weights, model, "v_proj") == 0
    assert 0 < distance(weights, model, "down_proj") < 0.01
    assert suggested_level(path) == "int4"


def test_a_4_bit_file_at_int8_loses_next_to_nothing(tmp_path: Path) -> None:
    model, path = make_model(LLAMA), tmp_path / "model.gguf"
    write_gguf(path, model, "Q4_1", kinds={"v_proj": "Q8_0"})
    weights = read(path, "int8")
    check(weights, dict.fromkeys([*BODY, *ENDS], 8))
    assert distance(weights, model, "v_proj") == 0
    assert distance(weights, model, "q_proj") < 0.006


def test_an_8_bit_file_keeps_its_values_at_int8_and_has_4_bits_at_int4(tmp_path: Path) -> None:
    model, path = make_model(LLAMA), tmp_path / "model.gguf"
    write_gguf(path, model, "Q8_0")
    eight, four = read(path, "int8"), read(path, "int4")
    check(eight, dict.fromkeys([*BODY, *ENDS], 8))
    assert all(distance(eight, model, part) == 0 for part in [*BODY, *ENDS])
    check(four, dict.fromkeys(BODY, 4) | dict.fromkeys(ENDS, 8))
    assert all(distance(four, model, part) < 0.07 for part in BODY)
    assert all(distance(four, model, part) == 0 for part in ENDS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_floats_have_4_bits_inside_and_8_at_both_ends(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(Qwen2Config(**SHAPE))
    model.to(dtype).save_pretrained(tmp_path)
    check(read(tmp_path, "int4"), _floats(4))
    check(read(tmp_path, "int8"), _floats(8))
    check(read(tmp_path, "bf16"), {"": 16})
    check(read(tmp_path, "fp32"), {"": 32})
    assert suggested_level(tmp_path) == "bf16"


def _floats(body: int) -> dict[str, int]:
    return {"bias": 32} | dict.fromkeys(BODY, body) | dict.fromkeys(ENDS, 8)


def test_heads_that_are_no_whole_groups_are_filled_up_one_by_one(tmp_path: Path) -> None:
    model, path = make_model(LlamaConfig(**SHAPE, head_dim=40)), tmp_path / "model.gguf"
    write_gguf(path, model, "Q4_0", kinds={"embed": "F16", "lm_head": "F16"})
    for level, count in (("int4", 4), ("int8", 8)):
        weights = read(path, level)
        out = weights["model.layers.1.self_attn.o_proj.weight"]
        assert isinstance(out, Quantized)
        assert (out.width, out.values.shape, bits(out)) == (40, (256, 8 * 64), count)
        assert distance(weights, model, "o_proj") < 0.1
        assert not out.dequantize().view(256, 8, 40).isnan().any()
        check(weights, dict.fromkeys(BODY, count) | dict.fromkeys(ENDS, 8))


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_the_suggested_level_is_the_files_own(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model(LLAMA), kind)
    eight, floats = {"Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"}, {"F64", "F32", "F16", "BF16"}
    assert suggested_level(tmp_path / "model.gguf") == ("bf16" if kind in floats else "int8" if kind in eight else "int4")
