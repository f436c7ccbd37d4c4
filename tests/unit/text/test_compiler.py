"""Grammars compile within bounds or are refused in words; what is compiled says which tokens may follow."""

import asyncio
import random
import resource
import time
from concurrent.futures import Future
from typing import Any

import pytest
from llguidance import LLMatcher

from services.text import compiler as compiler_module
from services.text.compiler import Compiler, CompilerBusy, GrammarError
from services.text.grammar import Grammar
from services.text.tokenizer import SpecialTokens, Tokenizer, Vocabulary
from tests.unit.gateway.build import EOS, VOCAB_SIZE, make_tokenizer
from tests.unit.text import hostile_grammars as hostile

TOKENIZER = make_tokenizer()
COMPILER = Compiler(TOKENIZER, VOCAB_SIZE, [EOS])
MOST_SECONDS = 2.0


def accepts(matcher: LLMatcher, text: str) -> bool:
    ahead, data = matcher.deep_copy(), list(text.encode())
    return bool(ahead.try_consume_tokens(data) == len(data) and ahead.is_accepting())


def follow(matcher: LLMatcher, steps: int, seed: int = 0) -> None:
    """Takes random allowed tokens, timing each mask."""
    rng = random.Random(seed)
    for _ in range(steps):
        start = time.thread_time()
        mask = matcher.compute_bitmask()
        assert time.thread_time() - start < 0.5, "a step of the engine waits for this"
        allowed = [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1 and token != EOS]
        if matcher.is_error() or not allowed:
            return
        matcher.consume_token(rng.choice(allowed))


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 12}'), ["3", "12"], ["2", "13", "", "x", "3.5"]),
        (Grammar("json_schema", "true"), ["1", '"a"', "null", "[]", '{"a": 1}'], ["", "nope"]),
        (Grammar("json_object"), ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'], ["[]", "1", "", "{}{}", "{" + " " * 30 + "}"]),
        (Grammar("regex", "a/b|c\nd"), ["a/b", "c\nd"], ["a", "a/b ", "xa/b"]),
        (Grammar("regex", r"\d{2}-\w+/"), ["12-ab/"], ["1-ab/", "12-/"]),
        (Grammar("choice", '["yes", "no \\"x\\"", "\\u007f/\\n", "né🎉"]'), ["yes", 'no "x"', "\x7f/\n", "né🎉"], ["ye", "yess", "no", ""]),
        (Grammar("lark", 'start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", "()", "xx"]),
        (Grammar("lark", "start: thing\nthing: %json {\"enum\": [1, 2]}"), ["1", "2"], ["3"]),
    ],
)  # fmt: skip
def test_each_kind(grammar: Grammar, yes: list[str], no: list[str]) -> None:
    matcher = COMPILER.compile_now(grammar)
    assert [text for text in yes if not accepts(matcher, text)] == []
    assert [text for text in no if accepts(matcher, text)] == []


def test_the_end_comes_where_the_grammar_may_end_and_special_tokens_are_no_text() -> None:
    matcher = COMPILER.compile_now(Grammar("regex", "<eos>|a+"))
    mask = matcher.compute_bitmask()
    assert not mask[EOS // 8] >> EOS % 8 & 1
    matcher.consume_token(ord("a"))
    mask = matcher.compute_bitmask()
    assert mask[EOS // 8] >> EOS % 8 & 1


def test_a_model_without_an_end_token_or_with_rows_that_no_token_uses() -> None:
    tokenizer = Tokenizer(TOKENIZER._backend, Vocabulary([bytes([byte]) for byte in range(256)], SpecialTokens()))
    matcher = Compiler(tokenizer, 300, []).compile_now(Grammar("choice", '["ab"]'))
    assert matcher.consume_tokens(list(b"ab"))
    assert matcher.is_stopped()
    assert not matcher.is_error()


# --- hostile


def refusal(grammar: Grammar) -> str:
    start = time.thread_time()
    with pytest.raises(GrammarError) as caught:
        COMPILER.compile_now(grammar)
    assert time.thread_time() - start < MOST_SECONDS
    words = str(caught.value)
    assert words
    assert len(words) <= 300
    assert "\n" not in words
    assert "%llguidance" not in words
    return words


def bounded(grammar: Grammar) -> None:
    """Refused, or compiled and followed."""
    start = time.thread_time()
    try:
        matcher = COMPILER.compile_now(grammar)
    except GrammarError:
        matcher = None
    assert time.thread_time() - start < MOST_SECONDS
    for seed in range(2 if matcher is not None else 0):
        follow(matcher.deep_copy(), 40, seed)


def test_there_are_as_many_hostile_grammars_as_promised() -> None:
    assert hostile.NUM_CASES >= 150


@pytest.mark.parametrize("schema", hostile.REFUSED_SCHEMAS, ids=lambda schema: hostile.as_text(schema)[:40])
def test_schemas_that_can_not_be_enforced_or_fulfilled(schema: Any) -> None:
    refusal(Grammar("json_schema", hostile.as_text(schema)))


@pytest.mark.parametrize("regex", hostile.REFUSED_REGEXES, ids=lambda regex: ascii(regex[:20]))
def test_regexes_that_are_none(regex: str) -> None:
    refusal(Grammar("regex", regex))


@pytest.mark.parametrize("lark", hostile.REFUSED_LARK, ids=lambda lark: ascii(lark[:20]))
def test_lark_that_is_none(lark: str) -> None:
    refusal(Grammar("lark", lark))


@pytest.mark.parametrize(
    "grammar",
    [
        *(Grammar("json_schema", hostile.as_text(schema)) for schema in hostile.COSTLY_SCHEMAS),
        *(Grammar("regex", regex) for regex in hostile.COSTLY_REGEXES),
        *(Grammar("lark", lark) for lark in hostile.COSTLY_LARK),
    ],
    ids=lambda grammar: ascii(grammar.text[:40]),
)
def test_what_is_built_to_cost_is_bounded(grammar: Grammar) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bounded(grammar)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_a_source_that_is_too_large() -> None:
    assert "at most" in refusal(Grammar("lark", 'start: "a"' + " " * compiler_module.MAX_SOURCE_BYTES))


# --- beside the event loop


async def test_what_is_compiled_is_kept_and_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_KEPT", 2)
    compiler = Compiler(TOKENIZER, VOCAB_SIZE, [EOS])
    first = await compiler.compile(Grammar("regex", "a"))
    second = await compiler.compile(Grammar("regex", "b"))
    assert await compiler.compile(Grammar("regex", "a")) is first
    await compiler.compile(Grammar("regex", "c"))
    assert await compiler.compile(Grammar("regex", "a")) is first
    assert await compiler.compile(Grammar("regex", "b")) is not second
    with pytest.raises(GrammarError):
        await compiler.compile(Grammar("regex", "("))


class Stuck(Compiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, VOCAB_SIZE, [EOS])
        self.go: Future[None] = Future()

    def compile_now(self, grammar: Grammar) -> LLMatcher:
        self.go.result()
        return super().compile_now(grammar)


async def test_more_than_may_wait_are_refused_at_once() -> None:
    compiler = Stuck()
    most = compiler_module._NUM_THREADS + compiler_module._MAX_WAITING
    waiting = [asyncio.create_task(compiler.compile(Grammar("choice", f'["{number}"]'))) for number in range(most)]
    await asyncio.sleep(0)
    with pytest.raises(CompilerBusy):
        await compiler.compile(Grammar("regex", "a"))
    compiler.go.set_result(None)
    assert len(await asyncio.gather(*waiting)) == most
    assert await compiler.compile(Grammar("regex", "a"))


async def test_what_takes_too_long_is_the_grammars_fault_where_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_SECONDS", 0.05)
    compiler = Stuck()
    results = await asyncio.gather(*(compiler.compile(Grammar("choice", f'["{number}"]')) for number in range(4)), return_exceptions=True)
    compiler.go.set_result(None)
    assert [type(result) for result in results] == [GrammarError, GrammarError, CompilerBusy, CompilerBusy]
