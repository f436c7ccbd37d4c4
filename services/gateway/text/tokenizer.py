"""A model's tokenizer."""

from collections.abc import Iterable


class Tokenizer:
    """Text to token ids and back."""

    vocab_size: int
    bos_token: str
    eos_token: str

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text. `add_special`: with what the model wants around a prompt (BOS), not for rendered templates."""
        raise NotImplementedError

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids as a continuation: a leading space stays."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; a special token's are its name's. Empty for an id that no token has."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """Those as text, with U+FFFD for parts of characters."""
        raise NotImplementedError
