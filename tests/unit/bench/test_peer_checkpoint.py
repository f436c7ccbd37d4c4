"""The folder that peers get is the same model as the GGUF: shape, weights, tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import peer_checkpoint
from bench.peer_venvs import PeerError
from services.cli.models import default
from services.text import model_files
from services.worker.engine.loader import expected_shapes, open_model, read_config


def test_the_folder_holds_the_same_model(tmp_path: Path) -> None:
    gguf = default().path
    folder = peer_checkpoint.safetensors_folder(gguf, tmp_path)
    assert read_config(folder) == read_config(gguf)
    with open_model(gguf) as ours, open_model(folder) as theirs:
        assert set(theirs.shapes) == set(expected_shapes(ours.config))
        for name in ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
            assert torch.equal(theirs.read(name).bfloat16(), ours.read(name).bfloat16())
    text = "<|im_start|>user\nWie geht's? 1234 naïve 🙂<|im_end|>\n"
    before, after = model_files.read(gguf), model_files.read(folder)
    assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert after.tokenizer.special == before.tokenizer.special
    assert after.template_source == before.template_source
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_checkpoint, "version", lambda _: "0123")
    (tmp_path / "tiny-bf16-0123").mkdir()
    assert peer_checkpoint.safetensors_folder(Path("tiny.gguf"), tmp_path) == tmp_path / "tiny-bf16-0123"


def test_a_model_that_is_no_plain_llama_is_refused_by_name() -> None:
    config = replace(read_config(default().path), architecture="qwen3")
    with pytest.raises(PeerError, match="not qwen3"):
        peer_checkpoint._config(config)
