"""Log-probabilities in OpenAI's two shapes: `content` lists (chat) and parallel arrays (completions)."""

import codecs
from collections.abc import Iterable
from typing import Any

from forebay.v1 import types_pb2

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


def chat_content(entries: Iterable[types_pb2.PositionLogprobs]) -> list[dict[str, Any]]:
    """One object per token, with its alternatives."""
    return [{**_chat_token(entry.chosen), "top_logprobs": [_chat_token(token) for token in entry.top]} for entry in entries]


def _chat_token(token: types_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": _name(token), "logprob": max(LOWEST, token.logprob), "bytes": list(token.text_bytes)}


def _name(token: types_pb2.TokenLogprob) -> str:
    """The token's text; a piece of a character is spelled out, so that two pieces never have one name."""
    try:
        return token.text_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text_bytes)


class LegacyLogprobs:
    """The parallel arrays of /v1/completions for one choice, in pieces: `text_offset` goes on from piece to piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(self, entries: Iterable[types_pb2.PositionLogprobs]) -> dict[str, Any]:
        """The next tokens. null stands where a token has no context: at the first position of an echoed prompt."""
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            name = _name(entry.chosen)
            out["tokens"].append(name)
            out["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(entry.chosen.text_bytes))
            if not entry.has_logprob:
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
                continue
            out["token_logprobs"].append(max(LOWEST, entry.chosen.logprob))
            top = {_name(token): max(LOWEST, token.logprob) for token in entry.top}
            top.setdefault(name, max(LOWEST, entry.chosen.logprob))
            out["top_logprobs"].append(top)
        return out
