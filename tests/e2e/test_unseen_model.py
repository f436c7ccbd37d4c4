"""A Hugging Face folder that `forebay up` has never seen: a tiny random Qwen3 in shards, with a tokenizer and a template of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import BadRequestError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.e2e import mesh as meshes
from tests.tiny_models import make_model

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MESSAGES = [{"role": "user", "content": "Wie heißt die Hauptstadt? 🗼"}]
_NUM_TOKENS = 24
_VOCAB = 290


def _make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the capital of a country", "die Hauptstadt eines Landes"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=specials)
    assert len(tokenizer) == _VOCAB
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[meshes.Mesh, str]]:
    """The mesh that serves it, and what transformers answers."""
    folder = tmp_path_factory.mktemp("qwen3-unseen")
    tokenizer = _make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = make_model(config)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    prompt = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=_NUM_TOKENS, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(answer[0, len(prompt) :], skip_special_tokens=True)
    with meshes.running(tmp_path_factory.mktemp("mesh") / "home", "--model", f"{folder}=strange", "--level", "fp32") as mesh:
        yield mesh, expected


def test_its_chat_is_what_transformers_says(qwen3: tuple[meshes.Mesh, str]) -> None:
    mesh, expected = qwen3
    client = mesh.openai()
    answer = client.chat.completions.create(
        model="strange",
        messages=_MESSAGES,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=_NUM_TOKENS,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == _NUM_TOKENS
    assert answer.choices[0].message.content == expected


def test_it_is_listed_with_its_context_length(qwen3: tuple[meshes.Mesh, str]) -> None:
    mesh, _ = qwen3
    listed = mesh.openai().models.list().data
    assert ["strange" in (model.id, *model.model_dump()["aliases"]) for model in listed] == [True]
    assert listed[0].model_dump()["max_model_len"] == 512


def test_a_request_that_bans_every_token_is_the_clients_mistake(qwen3: tuple[meshes.Mesh, str]) -> None:
    mesh, _ = qwen3
    with pytest.raises(BadRequestError, match="every token is banned"):
        mesh.openai().completions.create(model="strange", prompt="x", logit_bias={str(token): -100 for token in range(_VOCAB)})


def test_the_least_repetition_penalty_is_accepted(qwen3: tuple[meshes.Mesh, str]) -> None:
    mesh, _ = qwen3
    answer = mesh.openai().completions.create(model="strange", prompt="x", max_tokens=2, extra_body={"repetition_penalty": 1e-6})
    assert answer.choices[0].finish_reason == "length"
