"""Token ids equal those of transformers, whatever file the tokenizer comes from; unknown kinds are refused (B42c)."""

import copy
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.text import gguf_vocabulary, hf_folder
from services.text.gguf_metadata import ModelError, read_metadata
from services.text.tokenizer import Tokenizer
from tests.tiny_encoders import MAX_LEN, WORDS, change, minilm, save_encoder
from tests.unit.text.vocabularies import (
    TEXTS,
    byte_level,
    byte_level_fields,
    gguf,
    sentencepiece,
    sentencepiece_fields,
    smollm2_path,
    smollm2_reference,
)


def everything(_: str) -> bool:
    return True


def from_gguf(folder: Path, fields: dict[str, Any]) -> Tokenizer:
    path = folder / "model.gguf"
    path.write_bytes(gguf(fields))
    return gguf_vocabulary.build(read_metadata(path, everything))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return gguf_vocabulary.build(read_metadata(smollm2_path(), lambda key: key.startswith("tokenizer.ggml.")))


@pytest.fixture(scope="module")
def with_digits_apart() -> Any:
    """transformers' reading of the same file, with the digits apart as in the model's own tokenizer.json (its GGUF reading leaves them)."""
    reference = copy.deepcopy(smollm2_reference())
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return reference


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(smollm2: Tokenizer, with_digits_apart: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == with_digits_apart(text)["input_ids"]
    assert smollm2.decode(ids, skip_special=False) == with_digits_apart.decode(ids, clean_up_tokenization_spaces=False) == text


def test_smollm2_names_its_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.special.bos, smollm2.special.eos) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.decode(smollm2.encode("<|im_start|>a<|im_end|>")) == "a"
    assert smollm2.token_bytes(2) == b"<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "tekken"])
def test_byte_level_gguf_ids_equal_a_tokenizer_with_the_same_parts(tmp_path: Path, pre: str, text: str) -> None:
    tokenizer = from_gguf(tmp_path, byte_level_fields(pre, add_bos_token=False))
    expected = byte_level()
    if pre == "gpt-2":
        assert tokenizer.encode(text) == expected.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_gguf_ids_equal_the_trained_tokenizer(tmp_path: Path, text: str) -> None:
    tokenizer = from_gguf(tmp_path, sentencepiece_fields())
    assert tokenizer.encode(text) == sentencepiece().encode(text).ids
    assert tokenizer.encode(text, add_special=False) == sentencepiece().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("it's 12345",
        {"gpt-2": ["it", "'s", " 12345"], "qwen2": ["it", "'s", " ", "1", "2", "3", "4", "5"]}),
        ("it's 12345", {"llama-bpe": ["it", "'s", " ", "123", "45"]}),
        ("IT'S", {"gpt-2": ["IT", "'", "S"], "qwen2": ["IT", "'S"], "llama-bpe": ["IT", "'S"], "tekken": ["IT", "'S"]}),
        ("x²", {"smollm": ["x", "²"], "gpt-2": ["x", "²"]}),
        ("a\n\n b", {"qwen2": ["a", "\n\n", " b"], "gpt-2": ["a", "\n\n", " b"]}),
        ("camelCase", {"tekken": ["camel", "Case"], "qwen2": ["camelCase"]}),
    ],
)  # fmt: skip
def test_each_pre_tokenizer_parts_text_its_own_way(tmp_path: Path, text: str, pieces: dict[str, list[str]]) -> None:
    """Where every part of the text is a token, whatever the pre-tokenizer lets through whole comes out whole."""
    spelled = spell(text)
    parts = [spelled[start:end] for start in range(len(spelled)) for end in range(start + 2, len(spelled) + 1)]
    tokens = list(dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *parts]))
    merges = [f"{token[:-1]} {token[-1]}" for token in tokens if len(token) > 1]
    for pre, expected in pieces.items():
        fields = byte_level_fields(pre, tokens=tokens, token_type=[1] * len(tokens), merges=merges, add_bos_token=False)
        tokenizer = from_gguf(tmp_path, fields)
        assert [tokenizer.token_text(token) for token in tokenizer.encode(text)] == expected, pre


def spell(text: str) -> str:
    """A text in the byte alphabet."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return spelled


@pytest.mark.parametrize("pre", [None, "", "unheard-of", "Qwen2"])
def test_b42c_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, pre: str | None) -> None:
    with pytest.raises(ModelError, match=r"pre-tokenizer.*tokenizer\.json"):
        from_gguf(tmp_path, byte_level_fields(pre))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "t5"}, "kind 't5'"), ({"model": 5}, "kind 5"), ({"tokens": []}, "no vocabulary"), ({"tokens": [1,
        2]}, "isn't a list of str"),
        ({"token_type": [1, 2]}, "token types"), ({"merges": ["ab"]}, "merge of one part"), ({"merges": ["zz yy"]}, "hold together"),
        ({"bos_token_id": 10**6}, "bos_token_id"), ({"eos_token_id": "x"}, "eos_token_id"), ({"merges": "x"}, "isn't a list"),
    ],
)  # fmt: skip
def test_vocabularies_that_do_not_hold_together(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        from_gguf(tmp_path, byte_level_fields(**change))


def test_sentencepiece_without_scores_or_merges_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scores"):
        from_gguf(tmp_path, sentencepiece_fields(scores=[1.0]))


@pytest.mark.parametrize(
    ("flags", "before", "behind"),
    [
        ({}, 1, 0),
        ({"add_bos_token": False}, 0, 0),
        ({"add_eos_token": True}, 1, 1),
        ({"add_bos_token": False, "add_eos_token": True}, 0, 1),
    ],
)
def test_tokens_around_a_prompt(tmp_path: Path, flags: dict[str, bool], before: int, behind: int) -> None:
    tokenizer = from_gguf(tmp_path, sentencepiece_fields(**flags))
    inner = tokenizer.encode("hi", add_special=False)
    assert tokenizer.encode("hi") == [1] * before + inner + [2] * behind


def save_folder(folder: Path, backend: tokenizers.Tokenizer, **options: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 512, "model_type": "llama"}))
    return folder


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("backend", [byte_level, sentencepiece])
def test_folder_ids_equal_transformers(tmp_path: Path, backend: Any, text: str) -> None:
    folder = save_folder(tmp_path, backend(), bos_token="<s>", eos_token="</s>")
    tokenizer = hf_folder.read(folder).tokenizer
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("options", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_the_options_of_a_folder_decide_on_bos_and_eos(tmp_path: Path, options: dict[str, bool]) -> None:
    folder = save_folder(tmp_path, sentencepiece(), bos_token={"content": "<s>"}, eos_token="</s>", **options)
    tokenizer = hf_folder.read(folder).tokenizer
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", **options)
    assert tokenizer.encode("hello") == reference("hello")["input_ids"]


def test_truncation_and_padding_in_a_file_are_not_for_serving(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert hf_folder.read(save_folder(tmp_path, backend)).tokenizer.encode("x" * 40) == byte_level().encode("x" * 40).ids


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="its decoder is CTC; byte-level, sentencepiece and WordPiece ones are known"):
        hf_folder.read(save_folder(tmp_path, backend))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("config.json", "{", "not JSON"), ("config.json", "[]", "JSON object"), ("config.json", "{}", "max_position_embeddings"),
        ("config.json", '{"max_position_embeddings": 5, "vocab_size": true}', "vocab_size"), ("tokenizer.json", "{}", "can be used"),
        ("tokenizer.json", "\\xff", "can be used"), ("config.json", "[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_folders_that_cannot_be_used(tmp_path: Path, name: str, content: str, why: str) -> None:
    folder = save_folder(tmp_path, byte_level())
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=why) as caught:
        hf_folder.read(folder)
    assert name in str(caught.value)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        hf_folder.read(folder)


def test_ids_that_no_token_has_are_no_text(smollm2: Tokenizer) -> None:
    assert [smollm2.token_bytes(token) for token in (-1, smollm2.vocab_size, 2**31)] == [b"", b"", b""]
    assert smollm2.decode([smollm2.vocab_size, 2**31]) == ""


def test_an_encoders_folder_says_what_it_takes(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    folder = hf_folder.read(tmp_path)
    assert (folder.dimensions, folder.context_len, folder.vocab_size) == (48, MAX_LEN, len(WORDS))
    tokenizer = folder.tokenizer
    ids = tokenizer.encode("Ab c")
    assert ids == [2, WORDS.index("a"), WORDS.index("##b"), WORDS.index("c"), 3]
    assert tokenizer.decode(ids) == "ab c"
    assert tokenizer.encode_all(["Ab c", "d"]) == [ids, tokenizer.encode("d")]


def test_a_folder_may_ask_for_lower_case(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    change(tmp_path / "tokenizer.json", normalizer=None)
    upper, lower = (hf_folder.read(tmp_path).tokenizer.encode(text) for text in ("AB", "ab"))
    assert upper != lower
    change(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    assert hf_folder.read(tmp_path).tokenizer.encode("AB") == lower


def test_minilm_tokenises_as_transformers() -> None:
    ours, theirs = hf_folder.read(minilm()), AutoTokenizer.from_pretrained(minilm())
    assert (ours.dimensions, ours.context_len) == (384, 256)
    texts = ["Hello, World!", "naïve café", "狐と犬", "a" * 300, "one\ttwo\n\nthree", "🦊 don't", "x " * 300, "\u0000\ufffd[CLS]"]
    assert ours.tokenizer.encode_all(texts) == [theirs(text)["input_ids"] for text in texts]
