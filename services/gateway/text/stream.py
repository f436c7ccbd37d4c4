"""The text of one choice as its tokens come: whole characters only, and nothing that a stop string may still take back.

Pure: knows tokens' bytes and stop strings, no request. The text depends on the tokens alone, not on how they are grouped into pushes.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What a push brought."""

    text: str = ""
    """Safe to send: no later token can change it."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens that were taken; those behind a completed stop are not among them."""
    stopped: bool = False
    """A stop string is complete; nothing may be pushed any more."""


class TextStream:
    """The text of one choice. `push` tokens as they come, then `finish` once."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.decode_errors)
        self._stops = StopStrings(stop)
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes tokens up to the one that completes a stop string."""
        assert not self.stopped, "tokens pushed behind a stop"
        texts = []
        for index, token_id in enumerate(token_ids):
            chars = self._decoder.decode(self._tokenizer.text_bytes(token_id))
            text, self.stopped = self._stops.push(chars)
            texts.append(text)
            if self.stopped:
                return Piece("".join(texts), list(token_ids[: index + 1]), True)
        return Piece("".join(texts), list(token_ids))

    def finish(self) -> str:
        """What was held back: half a stop string, and U+FFFD for half a character. Nothing behind a stop, nothing twice."""
        if self.stopped:
            return ""
        text, self.stopped = self._stops.push(self._decoder.decode(b"", final=True))
        return text if self.stopped else text + self._stops.flush()


class StopStrings:
    """Cuts text at the first stop string to be complete; of several that end at one character, at the longest.

    Knuth-Morris-Pratt for each: what may yet become a stop is exactly what is held back, and a long stop costs no more than a short one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._matched = [0] * len(stops)  # characters of each stop that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What is safe of the text so far and was not returned yet; and whether a stop is complete, which is where it ends then."""
        if not self._stops:
            return text, False
        text = self._held + text
        for end in range(len(self._held), len(text)):
            for index, (stop, borders) in enumerate(self._stops):
                matched = self._matched[index]
                while matched and stop[matched] != text[end]:
                    matched = borders[matched - 1]
                matched += stop[matched] == text[end]
                self._matched[index] = matched
                if matched == len(stop):
                    self._held = ""
                    return text[: end + 1 - matched], True
        num_safe = len(text) - max(self._matched)
        self._held = text[num_safe:]
        return text[:num_safe], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is its suffix, too."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders
