"""Reading an encoder's folder: what it says is what is computed, and what isn't served is refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.config import ModelFileError
from services.worker.engine.encoder_config import Activation, EncoderConfig, Pooling
from services.worker.engine.encoder_file import encoder_version, is_encoder, load_encoder, read_encoder
from tests.tiny_encoders import MAX_LEN, SHAPE, change, change_tensors, minilm, save_encoder, write
from tests.tiny_models import save_model


def test_the_real_folder() -> None:
    assert read_encoder(minilm()) == EncoderConfig(
        num_layers=6,
        hidden_size=384,
        num_heads=12,
        intermediate_size=1536,
        vocab_size=30522,
        max_position=512,
        num_token_types=2,
        norm_epsilon=1e-12,
        activation=Activation.GELU,
        pooling=Pooling.MEAN,
        normalize=True,
        max_input_len=256,
    )


def test_without_a_length_of_its_own_an_input_is_as_long_as_there_are_positions(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    assert read_encoder(tmp_path).max_input_len == MAX_LEN
    (tmp_path / "sentence_bert_config.json").unlink()
    assert read_encoder(tmp_path).max_input_len == SHAPE["max_position_embeddings"]


def test_an_encoder_is_told_from_a_language_model(tmp_path: Path) -> None:
    save_encoder(tmp_path / "encoder")
    save_model("llama", tmp_path / "llama")
    assert is_encoder(tmp_path / "encoder")
    assert not is_encoder(tmp_path / "llama")
    assert not is_encoder(tmp_path / "model.gguf")


def test_tensors_of_another_task_and_a_prefix_do_no_harm(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    before, _ = load_encoder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "pooler.dense.weight" in tensors
    tensors["embeddings.position_ids"] = torch.arange(64)[None]
    save_file({f"bert.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    after, _ = load_encoder(tmp_path)
    assert torch.equal(before([[1, 2, 3]]), after([[1, 2, 3]]))


def test_a_version_names_weights_and_pooling(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    versions = {encoder_version(tmp_path)}
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    versions.add(encoder_version(tmp_path))
    save_encoder(tmp_path, seed=1)
    versions.add(encoder_version(tmp_path))
    assert len(versions) == 3


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    told: list[tuple[int, int]] = []
    load_encoder(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0


Break = Callable[[Path], None]

CONFIG_BREAKS: dict[str, tuple[Break, str]] = {
    "another model": (lambda f: change(f / "config.json", model_type="roberta"), "model_type 'roberta'.*isn't served as an encoder"),
    "another head": (lambda f: change(f / "config.json", architectures=["BertForMaskedLM"]), "BertForMaskedLM.*isn't served"),
    "activation": (lambda f: change(f / "config.json", hidden_act="silu"), "hidden_act 'silu' isn't served"),
    "positions": (lambda f: change(f / "config.json", position_embedding_type="relative_key"), "'relative_key' isn't served"),
    "decoder": (lambda f: change(f / "config.json", is_decoder=True), "is_decoder isn't served"),
    "quantised": (lambda f: change(f / "config.json", quantization_config={"bits": 4}), "quantised safetensors aren't served"),
    "no layers": (lambda f: change(f / "config.json", num_hidden_layers=0), "num_layers is 0; it must be from 1 to"),
    "huge": (lambda f: change(f / "config.json", hidden_size=1 << 40), "hidden_size is 1099511627776; it must be from 1 to"),
    "no number": (lambda f: change(f / "config.json", vocab_size="many"), "vocab_size is 'many'; it must be a whole number"),
    "heads": (lambda f: change(f / "config.json", num_attention_heads=5), "must be a multiple of num_heads"),
    "epsilon": (lambda f: change(f / "config.json", layer_norm_eps=-1), "norm_epsilon is -1"),
    "too long": (lambda f: change(f / "sentence_bert_config.json", max_seq_length=65), "max_seq_length is 65; it must be from 1 to the 64"),
    "prompt": (lambda f: write(f / "config_sentence_transformers.json", {"default_prompt_name": "query"}), "default_prompt_name 'query'"),
}


@pytest.mark.parametrize("name", CONFIG_BREAKS)
def test_a_shape_that_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_encoder(tmp_path)
    damage, words = CONFIG_BREAKS[name]
    damage(tmp_path)
    with pytest.raises(ModelFileError, match=words):
        read_encoder(tmp_path)


def modules(*entries: object) -> Break:
    return lambda folder: write(folder / "modules.json", list(entries))


TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
MODULE_BREAKS: dict[str, tuple[Break, str]] = {
    "none": (lambda f: (f / "modules.json").unlink(), "modules.json"),
    "no list": (lambda f: write(f / "modules.json", {}), "modules.json: isn't a JSON array"),
    "no object": (modules(TRANSFORMER, 7), "each entry must be an object with type and path"),
    "dense": (modules(TRANSFORMER, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}), "'Dense' isn't served"),
    "elsewhere": (modules(TRANSFORMER, {"type": "models.Pooling", "path": "../secrets"}), "'../secrets' isn't a folder right inside"),
    "weights elsewhere": (modules({"type": "models.Transformer", "path": "0_Transformer"}), "weights in '0_Transformer' aren't served"),
    "no pooling": (modules(TRANSFORMER), "Transformer in this order isn't served"),
    "empty": (modules(), "nothing in this order isn't served"),
    "two ways": (
        lambda f: write(f / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}),
        "pooling by cls_token, mean_tokens isn't served",
    ),
    "another way": (
        lambda f: write(f / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True}),
        "pooling by lasttoken isn't served",
    ),
}


@pytest.mark.parametrize("name", MODULE_BREAKS)
def test_pooling_that_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_encoder(tmp_path)
    damage, words = MODULE_BREAKS[name]
    damage(tmp_path)
    with pytest.raises(ModelFileError, match=words):
        read_encoder(tmp_path)


TENSOR_BREAKS: dict[str, tuple[torch.Tensor | None, str]] = {
    "encoder__layer__0__output__dense__bias": (None, "tensor 'encoder.layer.0.output.dense.bias' is missing"),
    "embeddings__word_embeddings__weight": (torch.zeros(3, 48), r"has the shape \(3, 48\); the configuration asks for \(57, 48\)"),
    "encoder__layer__7__output__dense__bias": (torch.zeros(48), "tensor 'encoder.layer.7.output.dense.bias' isn't known"),
}


@pytest.mark.parametrize("name", TENSOR_BREAKS)
def test_a_tensor_that_is_missing_wrong_or_unknown_is_refused(name: str, tmp_path: Path) -> None:
    save_encoder(tmp_path)
    tensor, words = TENSOR_BREAKS[name]
    change_tensors(tmp_path, **{name: tensor})
    with pytest.raises(ModelFileError, match=words):
        load_encoder(tmp_path)
