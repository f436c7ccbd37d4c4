"""The text of one choice as its tokens come: whole characters only, and nothing that a stop string may still take back.

Pure: knows tokens' bytes and stop strings, no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What a push brought."""

    text: str = ""
    """Safe to send: no later token can change it."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens that were taken; the tokens behind a completed stop are not among them."""
    stopped: bool = False
    """A stop string is complete; nothing must be pushed any more."""


class TextStream:
    """The text of one choice. `push` tokens as they come, `finish` once at the end unless it stopped."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        raise NotImplementedError

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes tokens up to the one that completes a stop string."""
        raise NotImplementedError

    def finish(self) -> str:
        """What was held back: half a stop string, and U+FFFD for half a character. Nothing where a stop was complete."""
        raise NotImplementedError
