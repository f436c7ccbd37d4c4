"""Compiles grammars for one model's vocabulary, within bounds of size, time and memory, beside the event loop.

Who waits for a result and what becomes of it is the caller's.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.text.grammar import Grammar
from services.text.tokenizer import Tokenizer

MAX_SOURCE_BYTES = 512 << 10
MAX_COMPILE_SECONDS = 2.0
_NUM_THREADS = 2
_MAX_WAITING = 32  # compilations behind those that run
_MAX_KEPT = 64
_MAX_KEPT_CHARS = 512 << 10  # of their texts: compiled, up to 150 times as many bytes
_MAX_WORDS = 300

# A step's fuel is some 15 ms. What a matcher's lexer may grow to is some 30 MB.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: |^invalid regex .* \(in regex\): ")


class GrammarError(ValueError):
    """A grammar can't be used; in llguidance's words, on one line."""


class CompilerBusy(Exception):
    """More grammars wait to be compiled than may."""


class Compiler:
    """A vocabulary to compile for, and the latest grammars compiled for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`vocab_size`: of the weights, which may have rows that no token uses. `end_ids`: tokens that end an output where it may end."""
        vocabulary = _Vocabulary(tokenizer, vocab_size, end_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.end_ids)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._places = BoundedSemaphore(_NUM_THREADS + _MAX_WAITING)

    async def compile(self, grammar: Grammar) -> LLMatcher:
        """The grammar at its start, to be copied for each output. Raises GrammarError or CompilerBusy."""
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        if not self._places.acquire(blocking=False):
            raise CompilerBusy(f"{_NUM_THREADS + _MAX_WAITING} grammars are being compiled")
        job = self._threads.submit(self.compile_now, grammar)
        job.add_done_callback(lambda _: self._places.release())
        try:
            matcher = await asyncio.wait_for(asyncio.wrap_future(job), MAX_COMPILE_SECONDS)
        except TimeoutError:
            if job.cancelled():  # it hadn't begun
                raise CompilerBusy(f"no grammar was compiled within {MAX_COMPILE_SECONDS:g} s") from None
            raise GrammarError(f"takes more than {MAX_COMPILE_SECONDS:g} s to compile: make it smaller") from None
        self._kept[grammar] = matcher
        while len(self._kept) > _MAX_KEPT or sum(len(kept.text) for kept in self._kept) > _MAX_KEPT_CHARS:
            self._kept.popitem(last=False)
        return matcher

    def compile_now(self, grammar: Grammar) -> LLMatcher:
        """As compile, in this thread, and kept nowhere."""
        source = grammar.source
        if len(source) > MAX_SOURCE_BYTES:
            raise GrammarError(f"comes to {len(source)} characters of Lark; at most {MAX_SOURCE_BYTES} are compiled")
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(source), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what has no first token, and what is too complex from the start
        if matcher.is_error():
            raise GrammarError(_words(matcher.get_error()))
        return matcher


class _Vocabulary:
    """What llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        # One more than there are stands for the end that it wants and a model may not have: behind every mask that is looked at.
        self.tokens = [*(tokenizer.token_bytes(token_id) for token_id in range(vocab_size)), b"<no end>"]
        self.special_token_ids = [*sorted(token_id for token_id in tokenizer.special.ids if token_id < vocab_size), vocab_size]
        self.end_ids = list(end_ids) or [vocab_size]
        self.eos_token_id = self.end_ids[0]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False) if isinstance(text, str) else []


def _words(error: str) -> str:
    """An error without its drawing of the place, which is in our source and not in the client's."""
    if error.startswith("NoExtensionBias"):
        return "nothing fulfils it"
    lines = [line for line in error.splitlines() if line and line != "<non-verbose/>" and not re.match(r"\s+(\d+ )?[|^]|\s+\^", line)]
    return _PLACE.sub("", " ".join(" ".join(lines).split()))[:_MAX_WORDS]
