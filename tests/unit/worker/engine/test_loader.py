"""Loading: GGUF of every type equals safetensors, versions name weights, what isn't served is refused by name."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from services.worker.engine.config import ModelFileError
from services.worker.engine.gguf_file import can_dequantize
from services.worker.engine.loader import load, read_config, version
from tests.tiny_models import GGUF_TYPES, make_model, run_alone, save_model, write_gguf

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
}
_TOKENS = [5, 17, 3, 95, 0, 41]


def check_equal(tmp_path: Path, config: PreTrainedConfig, kind: str) -> None:
    model = make_model(config)
    write_gguf(tmp_path / "model.gguf", model, kind)
    model.save_pretrained(tmp_path / "folder")
    ours, theirs = load(tmp_path / "model.gguf"), load(tmp_path / "folder")
    assert torch.equal(run_alone(ours, _TOKENS), run_alone(theirs, _TOKENS))


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_gguf_of_every_type_equals_safetensors(kind: str, tmp_path: Path) -> None:
    check_equal(tmp_path, _CONFIGS["llama"], kind)


@pytest.mark.parametrize("name", _CONFIGS)
def test_gguf_of_every_architecture_equals_safetensors(name: str, tmp_path: Path) -> None:
    check_equal(tmp_path, _CONFIGS[name], "Q8_0")


def test_every_type_that_can_be_dequantised_is_tested() -> None:
    assert {kind.name for kind in gguf.GGMLQuantizationType if can_dequantize(kind)} == GGUF_TYPES


def test_a_gguf_config_is_the_folders(tmp_path: Path) -> None:
    for name in ("llama", "qwen2", "qwen3"):
        model = make_model(_CONFIGS[name])
        write_gguf(tmp_path / f"{name}.gguf", model)
        model.save_pretrained(tmp_path / name)
        ours, theirs = read_config(tmp_path / f"{name}.gguf"), read_config(tmp_path / name)
        assert ours.norm_epsilon == pytest.approx(theirs.norm_epsilon)
        assert ours.eos_token_ids[0] == 2
        names = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "rope", "tied_embeddings", "qk_norm")
        assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    save_model("llama-tied", tmp_path)
    calls: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert calls[-1][1] <= (tmp_path / "model.safetensors").stat().st_size


def test_shards_equal_one_file(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(run_alone(load(tmp_path / "one"), _TOKENS), run_alone(load(tmp_path / "many"), _TOKENS))


def test_a_version_names_the_weights_and_not_the_place(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "a")
    save_model("llama", tmp_path / "b")
    assert version(tmp_path / "a") == version(tmp_path / "b")
    assert len(bytes.fromhex(version(tmp_path / "a"))) == 8
    assert load(tmp_path / "a").version == version(tmp_path / "a")
    path = tmp_path / "b" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert version(tmp_path / "b") != version(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_head.weight": None}, "'lm_head.weight' is missing"),
        ({"model.norm.weight": torch.ones(47)}, "'model.norm.weight' has the shape (47,); the configuration asks for (48,)"),
        ({"model.layers.1.mlp.gate.weight": torch.ones(4)}, "'model.layers.1.mlp.gate.weight' isn't known for llama"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, "'model.norm.weight' has the type I8"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(change: dict[str, torch.Tensor | None], words: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(path) | change).items() if tensor is not None}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count is 16"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.attention.sliding_window": 0}, ""),
    ],
)
def test_gguf_features_that_are_not_served_are_refused_by_name(extra: dict[str, int | str], words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model(_CONFIGS["llama"]), extra=extra)
    if not words:
        assert read_config(tmp_path / "model.gguf").sliding_window is None
        return
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path / "model.gguf")
    assert words in str(caught.value)


def test_gguf_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp stores llama3 scaling as one divisor per frequency."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, scaled = (
        make_model(LlamaConfig(**_SHAPE, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"} | kind)) for kind in ({}, scaling)
    )
    factors = plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    assert factors.max() > 1
    write_gguf(tmp_path / "model.gguf", scaled, tensors={"rope_freqs.weight": factors.numpy()})
    scaled.save_pretrained(tmp_path / "folder")
    ours, theirs = (run_alone(load(tmp_path / name), list(range(90))) for name in ("model.gguf", "folder"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_what_is_no_model_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "a.bin").write_bytes(b"PK\x03\x04 a zip file")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for path, words in {
        tmp_path: "'gpt2'",
        tmp_path / "a.bin": "not a GGUF file",
        tmp_path / "empty.gguf": "empty",
        tmp_path / "no": "no such file",
    }.items():
        for read in (load, read_config):
            with pytest.raises(ModelFileError) as caught:
                read(path)
            assert words in str(caught.value)
            assert "\n" not in str(caught.value)
