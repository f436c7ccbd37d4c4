"""Builds a tokenizer from the vocabulary in a GGUF file's metadata.

Such a file names its pre-tokenizer instead of carrying it; a name that isn't known here is refused, since a near miss gives other ids
and a worse model without a word.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from services.common import log
from services.text.gguf_metadata import ModelError
from services.text.tokenizer import SpecialTokens, Tokenizer, Vocabulary, byte_level_piece, sentencepiece_piece

_log = log.get(__name__)

# token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_MAX_PIECE_CHARS = 256  # sentencepiece pieces are short; a hostile one must not cost its square

# As the models' own tokenizer.json have them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SMOLLM = (r"\p{N}", _GPT2)
# What llama.cpp does with files whose converter did not know the pre-tokenizer.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "default": _DEFAULT,
}
_WHOLE_WORDS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))
_BOS_BY_DEFAULT = _WHOLE_WORDS_FIRST
_NFC = frozenset(("qwen2",))


def build(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes. Raises ModelError for a kind that isn't known or doesn't hold together."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelError(
            f"its tokenizer is of the kind {kind!r}; known are {', '.join(builders)}: use the model's folder with tokenizer.json"
        )
    source = _Source(metadata)
    try:
        return builders[str(kind)](source)
    except ModelError:
        raise
    except Exception as error:  # the library's own complaints about a vocabulary are plain Exceptions
        raise ModelError(f"its vocabulary doesn't hold together: {str(error)[:200]}") from None


class _Source:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.values("tokens", str)
        if not self.tokens:
            raise ModelError("it has no vocabulary (tokenizer.ggml.tokens)")
        kinds = self.values("token_type", int)
        if kinds and len(kinds) != len(self.tokens):
            raise ModelError(f"it has {len(self.tokens)} tokens but {len(kinds)} token types")
        self.kinds = kinds or [_NORMAL] * len(self.tokens)

    def values(self, name: str, kind: type) -> Any:
        values = self._metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ModelError(f"tokenizer.ggml.{name} isn't a list of {kind.__name__}")
        return values

    def text(self, name: str) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{name}", "")
        return value if isinstance(value, str) else ""

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        return value if isinstance(value, bool) else default

    def token(self, name: str) -> str:
        """The token that `NAME_token_id` points to, empty for none."""
        token_id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return ""
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise ModelError(f"tokenizer.ggml.{name}_token_id is {token_id}; it must be from 0 to {len(self.tokens) - 1}")
        return self.tokens[token_id]

    def special(self) -> SpecialTokens:
        ids = frozenset(index for index, kind in enumerate(self.kinds) if kind in (_CONTROL, _UNKNOWN))
        return SpecialTokens(ids, *(self.token(name) for name in ("bos", "eos", "unknown", "padding")))

    def vocabulary(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def merges(self) -> list[tuple[str, str]]:
        """Pairs in order of rank. A first part may be a space itself, so the parting space is never the first character."""
        pairs = []
        for merge in self.values("merges", str):
            cut = merge.find(" ", 1)
            if cut < 0:
                raise ModelError(f"it has a merge of one part: {merge[:40]!r}")
            pairs.append((merge[:cut], merge[cut + 1 :]))
        return pairs


def _byte_level(source: _Source) -> Tokenizer:
    pre = source.text("pre")
    if pre not in _SPLITS:
        what = f"names the pre-tokenizer {pre!r}, which isn't known" if pre else "doesn't name its pre-tokenizer (tokenizer.ggml.pre)"
        raise ModelError(
            f"it {what}, so its token ids would be wrong: convert it again with a current tool, or use the model's folder with "
            f"tokenizer.json. Known are {', '.join(sorted(_SPLITS))}"
        )
    if pre == "default":
        _log.warning("pre_tokenizer_default", why="the file's converter did not know the tokenizer: ids may differ from the model's own")
    backend = tokenizers.Tokenizer(
        models.BPE(source.vocabulary(), source.merges(), fuse_unk=False, byte_fallback=False, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    special = source.special()
    _add_tokens(backend, source)
    _surround(backend, source, special, bos_by_default=pre in _BOS_BY_DEFAULT)
    # Control and user-defined tokens are written as they are, the others in the byte alphabet.
    pieces = [
        token.encode() if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) else byte_level_piece(token)
        for token, kind in zip(source.tokens, source.kinds, strict=True)
    ]
    return Tokenizer(backend, Vocabulary(pieces, special))


def _sentencepiece(source: _Source) -> Tokenizer:
    vocabulary = source.vocabulary()
    unknown = source.token("unknown") or "<unk>"
    merges = source.merges() or _merges_from_scores(source, vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown if unknown in vocabulary else None, fuse_unk=True, byte_fallback=True)
    )
    add_space = source.flag("add_space_prefix", True)
    prepend = [normalizers.Prepend("\u2581")] if add_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = source.special()
    _add_tokens(backend, source)
    _surround(backend, source, special, bos_by_default=True)
    pieces = [
        token.encode() if kind in (_CONTROL, _UNKNOWN) else sentencepiece_piece(token)
        for token, kind in zip(source.tokens, source.kinds, strict=True)
    ]
    return Tokenizer(backend, Vocabulary(pieces, special, sentencepiece=True, false_space=add_space))


def _merges_from_scores(source: _Source, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to part a token into two others, best score first: what sentencepiece would merge, as ranked pairs."""
    scores = source.values("scores", float)
    if len(scores) != len(source.tokens):
        raise ModelError(f"it has {len(source.tokens)} tokens but {len(scores)} scores, and no merges")
    ranked = []
    for token, score, kind in zip(source.tokens, scores, source.kinds, strict=True):
        if kind not in (_NORMAL, _UNUSED) or len(token) > _MAX_PIECE_CHARS:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(backend: tokenizers.Tokenizer, source: _Source) -> None:
    """Tokens that are found in text as wholes. Those of no characters can't be."""
    whole = {kind: [] for kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)}  # type: dict[int, list[AddedToken]]
    for token, kind in zip(source.tokens, source.kinds, strict=True):
        if token and kind in whole:
            whole[kind].append(AddedToken(token, normalized=False, special=kind != _USER_DEFINED))
    backend.add_special_tokens(whole[_CONTROL] + whole[_UNKNOWN])
    backend.add_tokens(whole[_USER_DEFINED])


def _surround(backend: tokenizers.Tokenizer, source: _Source, special: SpecialTokens, *, bos_by_default: bool) -> None:
    surround(
        backend,
        bos=special.bos if source.flag("add_bos_token", bos_by_default) else "",
        eos=special.eos if source.flag("add_eos_token", False) else "",
    )


def surround(backend: tokenizers.Tokenizer, *, bos: str, eos: str) -> None:
    """Makes encoding with special tokens put `bos` before and `eos` behind a text, where they aren't empty."""
    parts = [part for part in (bos, "$A", eos) if part]
    tokens = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=tokens)
