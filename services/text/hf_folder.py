"""Reads tokenizer, chat template and shape from a Hugging Face model folder, within bounds. No weights."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from services.text.gguf_metadata import ModelError
from services.text.gguf_vocabulary import surround
from services.text.tokenizer import SpecialTokens, Tokenizer, Vocabulary, byte_level_piece, sentencepiece_piece, wordpiece_piece

_MAX_TOKENIZER_BYTES = 128 << 20
_MAX_CONFIG_BYTES = 8 << 20
_ENCODERS = (["BertModel"],)
"""Architectures that make vectors of texts, as config.json names them."""


@dataclass(frozen=True)
class Folder:
    """What the gateway takes from a folder."""

    tokenizer: Tokenizer
    template_source: str | None
    context_len: int
    vocab_size: int
    dimensions: int = 0  # of an encoder's vectors; 0: a language model


def read(path: Path) -> Folder:
    """Raises ModelError for a file that is missing, too large, or not understood."""
    config = _json(path / "config.json", _MAX_CONFIG_BYTES)
    options = _optional(path / "tokenizer_config.json")
    if config.get("architectures") in _ENCODERS:
        return _encoder(path, config, options)
    return Folder(
        tokenizer=_tokenizer(path / "tokenizer.json", options),
        template_source=_template(path, options),
        context_len=_positive(config, "max_position_embeddings", path),
        vocab_size=_positive(config, "vocab_size", path),
    )


def _encoder(path: Path, config: Mapping[str, Any], options: Mapping[str, Any]) -> Folder:
    """A sentence-transformers folder says how long an input may be, and whether it is lowered before anything else."""
    sentences, name = _optional(path / "sentence_bert_config.json"), "max_seq_length"
    context_len = _positive(config, "max_position_embeddings", path)
    if sentences.get(name) is not None:
        context_len = min(context_len, _positive(sentences, name, path, "sentence_bert_config.json"))
    return Folder(
        tokenizer=_tokenizer(path / "tokenizer.json", options, lowered=sentences.get("do_lower_case") is True),
        template_source=None,
        context_len=context_len,
        vocab_size=_positive(config, "vocab_size", path),
        dimensions=_positive(config, "hidden_size", path),
    )


def _tokenizer(path: Path, options: Mapping[str, Any], *, lowered: bool = False) -> Tokenizer:
    source = _text(path, _MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{path}: not a tokenizer that can be used: {str(error)[:200]}") from None
    backend.no_truncation()
    backend.no_padding()
    if lowered:
        lower = tokenizers.normalizers.Lowercase()
        backend.normalizer = tokenizers.normalizers.Sequence([lower, backend.normalizer]) if backend.normalizer else lower
    names = {name: _token_name(options.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    # As transformers does: what the options call special is special, whatever tokenizer.json says.
    known = [name for name in names.values() if name and backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in known if not _is_added(backend, name)])
    if "add_bos_token" in options or "add_eos_token" in options:
        bos, eos = names["bos"], names["eos"]
        surround(backend, bos=bos if options.get("add_bos_token") else "", eos=eos if options.get("add_eos_token") else "")
    decoder = json.loads(source).get("decoder")
    return Tokenizer(backend, _vocabulary(backend, decoder, names, path))


def _is_added(backend: tokenizers.Tokenizer, name: str) -> bool:
    return any(token.content == name for token in backend.get_added_tokens_decoder().values())


def _vocabulary(backend: tokenizers.Tokenizer, decoder: object, names: Mapping[str, str], path: Path) -> Vocabulary:
    kinds = list(_decoder_kinds(decoder))
    sentencepiece, wordpiece = "ByteFallback" in kinds or "Metaspace" in kinds, "WordPiece" in kinds
    if not sentencepiece and not wordpiece and "ByteLevel" not in kinds:
        raise ModelError(f"{path}: its decoder is {', '.join(kinds) or 'missing'}; byte-level, sentencepiece and WordPiece ones are known")
    spell = wordpiece_piece if wordpiece else sentencepiece_piece if sentencepiece else byte_level_piece
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = spell(token)
    added = backend.get_added_tokens_decoder()
    for token_id, added_token in added.items():
        pieces[token_id] = added_token.content.encode()
    ids = frozenset(token_id for token_id, added_token in added.items() if added_token.special)
    return Vocabulary(pieces, SpecialTokens(ids, **names), sentencepiece, wordpiece or _strips_space(decoder))


def _decoder_kinds(decoder: object) -> Iterator[str]:
    """The types of a decoder and of its parts."""
    if isinstance(decoder, Mapping):
        yield str(decoder.get("type"))
        parts = decoder.get("decoders")
        for part in parts if isinstance(parts, list) else ():
            yield from _decoder_kinds(part)


def _strips_space(decoder: object) -> bool:
    """Whether a decoder takes one space off the front of a text."""
    if not isinstance(decoder, Mapping):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and any(_strips_space(part) for part in parts)
    if decoder.get("type") == "Strip":
        return bool(decoder.get("start"))
    return decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme") != "never"


def _template(path: Path, options: Mapping[str, Any]) -> str | None:
    """A file of its own goes before the options; of several named ones the default."""
    if (path / "chat_template.jinja").exists():
        return _text(path / "chat_template.jinja", _MAX_CONFIG_BYTES)
    template = options.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_name(value: object) -> str:
    """A token of tokenizer_config.json: a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _positive(config: Mapping[str, Any], name: str, path: Path, file: str = "config.json") -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path / file}: {name} is {value!r}; it must be a positive integer")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return _json(path, _MAX_CONFIG_BYTES) if path.exists() else {}


def _json(path: Path, most: int) -> dict[str, Any]:
    try:
        value = json.loads(_text(path, most))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ModelError) else ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def _text(path: Path, most: int) -> str:
    try:
        size = path.stat().st_size
        if size > most:
            raise ModelError(f"{path}: has {size} bytes; at most {most} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from None
