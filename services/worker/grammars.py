"""Grammars for the engine: llguidance's matchers behind the engine's protocol, and the compiler's refusals as statuses."""

import json
from collections.abc import Sequence
from typing import cast

from llguidance import LLMatcher

from forebay.v1 import types_pb2
from services.common.errors import Code, StatusError, invalid
from services.text.compiler import MAX_SOURCE_BYTES, Compiler, CompilerBusy, GrammarError
from services.text.grammar import Grammar, Kind

_FIELD = "sampling.grammar"


class CompiledGrammar:
    """Implements the engine's Grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> "MatcherState":
        """See Grammar."""
        return MatcherState(self._matcher.deep_copy())


class MatcherState:
    """Implements the engine's GrammarState."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._error: str | None = None

    @property
    def complete(self) -> bool:
        """See GrammarState."""
        return self.error is None and self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """See GrammarState."""
        if self._error is None and self._matcher.is_error():
            self._error = f"the grammar can't be followed: {' '.join(self._matcher.get_error().split())[:200]}"
        return self._error

    def advance(self, token_id: int) -> None:
        """See GrammarState."""
        if self.error is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            self._error = f"token {token_id} doesn't fit the grammar"

    def masks(self, drafts: Sequence[int] = ()) -> list[bytes]:
        """See GrammarState."""
        masks = [_mask(self._matcher)]
        ahead = self._matcher.deep_copy() if drafts else self._matcher
        for token_id in drafts:
            if not ahead.is_stopped() and ahead.try_consume_tokens([token_id]):
                masks.append(_mask(ahead))
            else:
                masks.append(masks[-1])
        return masks


def _mask(matcher: LLMatcher) -> bytes:
    """Nothing where the matcher has failed: it would allow the end, and half an output would pass for a whole one."""
    mask = matcher.compute_bitmask()
    return bytes(len(mask)) if matcher.is_error() else mask


async def compiled(sampling: types_pb2.SamplingParams, compiler: Compiler | None) -> CompiledGrammar | None:
    """The grammar that a request asks for, if it does. StatusError: it can't be used, or too many are being compiled."""
    if not sampling.HasField("grammar"):
        return None
    if compiler is None:
        raise invalid(_FIELD, f"{_FIELD}: this model's files have no tokenizer that grammars could be compiled for")
    try:
        return CompiledGrammar(await compiler.compile(_from_wire(sampling.grammar)))
    except GrammarError as error:
        raise invalid(_FIELD, f"{_FIELD}: {error}") from None
    except CompilerBusy as error:
        raise StatusError(Code.RESOURCE_EXHAUSTED, f"no room on this worker: {error}; place again", reason="NO_ROOM") from None


def _from_wire(message: types_pb2.Grammar) -> Grammar:
    """The message, not yet compiled: that checks the rest."""
    kind = message.WhichOneof("kind")
    if kind is None or message.ByteSize() > MAX_SOURCE_BYTES:
        raise GrammarError(f"has no kind, or {message.ByteSize()} bytes: at most {MAX_SOURCE_BYTES} are compiled")
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "choice" and not message.choice.choices:
        raise GrammarError("has no choices")
    text = json.dumps(list(message.choice.choices)) if kind == "choice" else getattr(message, kind)
    if kind == "json_schema":
        _check_json(text)
    return Grammar(cast("Kind", kind), text)


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"has a schema that isn't JSON: {error}") from None
