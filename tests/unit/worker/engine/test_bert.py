"""The encoder's vectors against transformers', for every pooling and activation, and with the real MiniLM."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, BertModel

from services.worker.engine.encoder_file import load_encoder
from tests.tiny_encoders import SHAPE, minilm, reference, save_encoder

CLOSE = {"rtol": 0, "atol": 1e-4}  # the promise is 1e-3


def some_inputs(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(int(SHAPE["vocab_size"])) for _ in range(length)] for length in lengths]


def check_equal(folder: Path, model: BertModel, inputs: Sequence[Sequence[int]], **how: str | bool) -> None:
    encoder, _ = load_encoder(folder)
    vectors = encoder(inputs)
    expected = torch.stack([reference(model, ids, **how) for ids in inputs])
    torch.testing.assert_close(vectors, expected, **CLOSE)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "max_tokens"])
def test_vectors_equal_transformers_for_every_pooling(pooling: str, normalize: bool, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, pooling=pooling, normalize=normalize)
    check_equal(tmp_path, model, some_inputs([1, 17, 5, 40, 5]), pooling=pooling, normalize=normalize)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_vectors_equal_transformers_for_every_activation(activation: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, hidden_act=activation)
    check_equal(tmp_path, model, some_inputs([3, 9]))


def test_an_inputs_vector_does_not_depend_on_its_company(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    encoder, _ = load_encoder(tmp_path)
    inputs = some_inputs([2, 40, 7])
    together: Tensor = encoder(inputs)
    torch.testing.assert_close(together, torch.cat([encoder([ids]) for ids in inputs]), rtol=0, atol=1e-5)


def test_minilm_equals_transformers() -> None:
    model, tokenizer = BertModel.from_pretrained(minilm()).eval(), AutoTokenizer.from_pretrained(minilm())
    texts = ["Hello, world!", "a", "The river froze over in January. " * 20, "Füchse überqueren Straßen. 狐 🦊"]
    check_equal(minilm(), model, [tokenizer(text)["input_ids"] for text in texts])
