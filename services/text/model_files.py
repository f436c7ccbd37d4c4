"""What text needs of a model's files, be they a GGUF file or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

from services.text import gguf_vocabulary, hf_folder
from services.text.gguf_metadata import ModelError, read_metadata
from services.text.tokenizer import Tokenizer

_GGUF_FIELDS = frozenset(("general.architecture", "tokenizer.chat_template"))


@dataclass(frozen=True)
class ModelFiles:
    """Tokenizer, source of the chat template, and sizes in tokens."""

    tokenizer: Tokenizer
    template_source: str | None
    context_len: int
    vocab_size: int
    dimensions: int = 0  # of the vectors that it makes of texts; 0: it generates text


def read(path: Path) -> ModelFiles:
    """Reads no weights. Raises ModelError for a file that is missing, damaged or not understood."""
    if not path.exists():
        raise ModelError(f"{path}: there is no such file or folder")
    if path.is_dir():
        folder = hf_folder.read(path)
        return ModelFiles(folder.tokenizer, folder.template_source, folder.context_len, folder.vocab_size, folder.dimensions)
    return _read_gguf(path)


def _read_gguf(path: Path) -> ModelFiles:
    metadata = read_metadata(path, lambda key: key in _GGUF_FIELDS or key.startswith("tokenizer.ggml.") or key.endswith(".context_length"))
    try:
        tokenizer = gguf_vocabulary.build(metadata)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    context_len = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if not isinstance(context_len, int) or context_len < 1:
        raise ModelError(f"{path}: its metadata has no context length")
    source = metadata.get("tokenizer.chat_template")
    return ModelFiles(tokenizer, source if isinstance(source, str) else None, context_len, tokenizer.vocab_size)
