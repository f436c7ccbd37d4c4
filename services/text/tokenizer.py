"""A model's tokenizer: text to token ids and back, each token's own bytes, and the names of its special tokens.

How it comes from a model's files is in hf_folder and gguf_vocabulary.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import tokenizers

REPLACEMENT = "\ufffd"
_PER_BYTE = "forebay-replace-per-byte"


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT, error.start + 1


codecs.register_error(_PER_BYTE, _replace_one_byte)


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that stand for no text. Names are empty where the model has none."""

    ids: frozenset[int] = frozenset()
    bos: str = ""
    eos: str = ""
    unk: str = ""
    pad: str = ""


@dataclass(frozen=True)
class Vocabulary:
    """What each token id spells."""

    pieces: Sequence[bytes]
    """Bytes by id: a special token's are its name's."""
    special: SpecialTokens = field(default_factory=SpecialTokens)
    sentencepiece: bool = False
    """Each bad byte is one U+FFFD, as sentencepiece has it; else each bad sequence is."""
    false_space: bool = False
    """The first word of a text got a space that isn't the text's."""


class Tokenizer:
    """Encodes as the model's own tokenizer; decodes by its tokens' bytes, so that any split of a stream gives the same text."""

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.pieces)
        self.special = vocabulary.special
        self._backend = backend
        self._pieces = vocabulary.pieces
        self._false_space = vocabulary.false_space
        self.decode_errors = _PER_BYTE if vocabulary.sentencepiece else "replace"
        """How bad bytes become U+FFFD: the name of a codecs error handler."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text. `add_special`: with what the model wants around a prompt (BOS); not for rendered templates.

        Lets other threads run meanwhile, which a single `encode` of the library does not.
        """
        return self.encode_all([text], add_special=add_special)[0]

    def encode_all(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """As `encode`, of several texts at once, on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special)]

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The whole text of ids. The false space in front of a sentencepiece text is left out."""
        special = self.special.ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in special)
        text = data.decode("utf-8", self.decode_errors)
        return text.removeprefix(" ") if self._false_space else text

    def to_json(self) -> str:
        """What a tokenizer.json of it holds."""
        return str(self._backend.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; a special token's are its name's. Empty for an id that no token has."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """Those as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", self.decode_errors)

    def text_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text: nothing if it is special."""
        return b"" if token_id in self.special.ids else self.token_bytes(token_id)


def byte_level_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level vocabularies write bytes as: printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def byte_level_piece(token: str) -> bytes:
    """The bytes that a byte-level vocabulary's token spells; one that has other characters spells itself."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentencepiece_piece(token: str) -> bytes:
    """The bytes that a sentencepiece token spells: <0xNN> is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode("utf-8", "replace")


def wordpiece_piece(token: str) -> bytes:
    """The bytes that a WordPiece token spells: what doesn't go on a word, by ##, begins one. Its text is what the normalizer left of it."""
    return token.removeprefix("##").encode("utf-8", "replace") if token.startswith("##") else b" " + token.encode("utf-8", "replace")
