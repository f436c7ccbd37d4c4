"""The same model for peers that read no GGUF: a Hugging Face folder in bf16 with the GGUF's own values, and what OpenVINO makes of it.

Each is written once, and whole or not at all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.peer_venvs import PeerError
from services.text import model_files
from services.worker.engine.config import ModelConfig, RopeConfig
from services.worker.engine.loader import expected_shapes, open_model, version


def safetensors_folder(gguf: Path, root: Path) -> Path:
    """The folder with config.json, tokenizer.json and model.safetensors. Raises PeerError for a model that isn't a plain Llama."""
    folder = root / f"{gguf.stem}-bf16-{version(gguf)}"
    if folder.exists():
        return folder
    print(f"writing {folder}", file=sys.stderr, flush=True)
    fresh = folder.with_name(f"{folder.name}.part")
    fresh.mkdir(parents=True, exist_ok=True)
    with open_model(gguf) as source:
        tensors = {name: source.read(name).to(torch.bfloat16).contiguous() for name in expected_shapes(source.config)}
        config = _config(source.config)
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    files = model_files.read(gguf)
    special = files.tokenizer.special
    tokens = {"bos_token": special.bos, "eos_token": special.eos, "unk_token": special.unk, "pad_token": special.pad}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": files.context_len,
        "chat_template": files.template_source,
    }
    (fresh / "config.json").write_text(json.dumps(config, indent=1))
    (fresh / "tokenizer.json").write_text(files.tokenizer.to_json())
    (fresh / "tokenizer_config.json").write_text(json.dumps(tokenizer | {name: text for name, text in tokens.items() if text}, indent=1))
    fresh.rename(folder)
    return folder


def openvino_folder(safetensors: Path, python: Path) -> Path:
    """What optimum-intel makes of it with weights in int8. `python` is that of an environment that has it. Raises PeerError."""
    folder = safetensors.with_name(safetensors.name.replace("-bf16-", "-openvino-int8-"))
    if folder.exists():
        return folder
    print(f"writing {folder}, a minute", file=sys.stderr, flush=True)
    fresh, log = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.log")
    words = [
        "export",
        "openvino",
        "--model",
        str(safetensors),
        "--task",
        "text-generation-with-past",
        "--weight-format",
        "int8",
        str(fresh),
    ]
    with log.open("w") as output:
        command = [str(python.with_name("optimum-cli")), *words]
        if subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=output, stderr=output).returncode:
            raise PeerError(f"openvino: optimum-cli can't convert the model, see {log}")
    fresh.rename(folder)
    return folder


def _config(config: ModelConfig) -> dict[str, object]:
    """config.json as transformers reads it."""
    if config.architecture != "llama" or config.rope != RopeConfig(config.rope.theta) or config.sliding_window:
        raise PeerError(f"only a plain Llama is written as safetensors, not {config.architecture} with rope {config.rope.kind}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
    }
