"""Grammars on the worker: states that follow drafts, outputs of the whole engine that fit, refusals that are the request's own."""

import json
from array import array
from collections.abc import Sequence as Seq
from typing import Any

import grpc
import pytest

from forebay.v1 import types_pb2
from services.common.errors import StatusError
from services.text.compiler import Compiler
from services.text.grammar import Grammar
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, FinishReason, SamplingParams
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.speculator import Speculator
from services.worker.grammars import CompiledGrammar, compiled
from tests import worker_harness
from tests.drafters import Guesser, always
from tests.fake_runner import FakeRunner, next_token
from tests.unit.gateway.build import EOS, VOCAB_SIZE, make_tokenizer

COMPILER = Compiler(make_tokenizer(), VOCAB_SIZE, [EOS])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONFIG = EngineConfig(num_blocks=256, block_size=4, max_step_tokens=64)


def grammar(kind: Any, text: str = "") -> CompiledGrammar:
    return CompiledGrammar(COMPILER.compile_now(Grammar(kind, text)))


def schema(value: Any) -> CompiledGrammar:
    return grammar("json_schema", json.dumps(value))


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1}


def letters(text: str) -> set[int]:
    return set(text.encode())


def engine(config: EngineConfig = CONFIG, speculator: Speculator | None = None) -> Engine:
    runner = FakeRunner(config.num_blocks, config.block_size, vocab_size=VOCAB_SIZE)
    return Engine(runner, config, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], speculator=speculator)


def drain(runner: Engine, *requests: EngineRequest) -> dict[tuple[str, int], tuple[list[int], FinishReason | None, str | None]]:
    """Each choice's tokens, reason and error."""
    for request in requests:
        runner.add(request)
    whole: dict[tuple[str, int], tuple[list[int], FinishReason | None, str | None]] = {}
    while runner.has_work:
        for output in runner.step(0.0):
            tokens, *_ = whole.get((output.request_id, output.choice_index), ([], None, None))
            whole[output.request_id, output.choice_index] = ([*tokens, *output.token_ids], output.finish_reason, output.error)
        runner.check_integrity()
    return whole


def seeded(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, "seed": seed} | fields)


# --- states


def test_masks_behind_drafts_are_those_of_a_state_that_took_them() -> None:
    state = grammar("regex", "a(b|cd)e?").start()
    masks = state.masks(list(b"acd"))
    assert [allowed(mask) for mask in masks] == [letters("a"), letters("bc"), letters("d"), letters("e") | {EOS}]
    assert allowed(state.masks()[0]) == letters("a"), "the state stays where it is"
    state.advance(ord("a"))
    assert [allowed(mask) for mask in state.masks(list(b"xb"))[:1]] == [letters("bc")]
    assert len(state.masks(list(b"xb"))) == 3
    assert len(state.masks([*b"be", EOS, EOS])) == 5
    assert state.error is None


def test_a_state_is_complete_where_nothing_can_follow() -> None:
    state = grammar("choice", '["ab", "abc"]').start()
    seen = []
    for token in b"abc":
        state.advance(token)
        seen.append(state.complete)
    assert seen == [False, False, True]


def test_a_token_that_does_not_fit_is_an_error_and_allows_nothing_more() -> None:
    state = grammar("choice", '["ab"]').start()
    state.advance(ord("x"))
    assert state.error
    assert "120" in state.error
    assert not state.complete
    assert not allowed(state.masks()[0])
    state.advance(ord("a"))
    assert state.error


def test_states_of_one_grammar_know_nothing_of_each_other() -> None:
    compiled_grammar = grammar("choice", '["ab", "cd"]')
    first, second = compiled_grammar.start(), compiled_grammar.start()
    first.advance(ord("a"))
    second.advance(ord("c"))
    assert (allowed(first.masks()[0]), allowed(second.masks()[0])) == (letters("b"), letters("d"))


# --- the engine


def test_every_choice_fits_and_ends_where_it_is_complete() -> None:
    requests = [EngineRequest(f"r{seed}", [1, 2, seed], seeded(seed), n=4, grammar=schema(PERSON)) for seed in range(4)]
    endings = drain(engine(), *requests, EngineRequest("free", [1], seeded(1, max_tokens=30, ignore_eos=True)))
    assert len(endings) == 17
    assert len(endings.pop(("free", 0))[0]) == 30
    whole = [bytes(tokens) for tokens, reason, _ in endings.values() if reason is FinishReason.COMPLETE]
    assert len(whole) > 8
    for text in whole:
        person = json.loads(text)
        assert isinstance(person["name"], str)
        assert 0 <= person["age"] <= 150
    assert all(reason in (FinishReason.COMPLETE, FinishReason.LENGTH) for _, reason, _ in endings.values())


def guess(sequence: Sequence, drafted: Seq[int]) -> int:
    """What the stand-in would say, right or wrong by turns."""
    token = next_token(array("i", [*sequence.tokens, *drafted]), sequence, VOCAB_SIZE, num_drafts=len(drafted))
    return (token or 0) if len(sequence.tokens) % 5 else ord("x")


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
def test_drafts_change_nothing_of_what_comes_under_a_grammar(max_drafts: int) -> None:
    requests = [
        EngineRequest(f"r{seed}", [1, 2, seed], seeded(seed, min_tokens=5 * (seed % 2)), n=2, grammar=schema(PERSON)) for seed in range(6)
    ]
    requests += [EngineRequest("free", [1], seeded(1, max_tokens=30, ignore_eos=True))]
    speculating = engine(speculator=always(max_drafts, Guesser(guess)))
    assert drain(speculating, *requests) == drain(engine(), *requests)
    assert speculating.stats().num_accepted_tokens > speculating.stats().num_draft_tokens / 3


def test_a_preempted_choice_keeps_its_place_in_the_grammar() -> None:
    requests = [EngineRequest(f"r{seed}", [1, 2, seed], seeded(seed, max_tokens=60), grammar=schema(PERSON)) for seed in range(6)]
    alone = {key: ending for request in requests for key, ending in drain(engine(), request).items()}
    crowded = engine(EngineConfig(num_blocks=24, block_size=4, max_step_tokens=64))
    assert drain(crowded, *requests) == alone
    assert crowded.stats().num_preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_b42f_a_choice_that_moves_mid_json_goes_on_as_it_would_have(seed: int) -> None:
    request = EngineRequest("r", [1, 2, 3], seeded(seed), grammar=schema(PERSON))
    tokens, reason, _ = drain(engine(), request)["r", 0]
    for cut in range(1, len(tokens)):
        moved = EngineRequest("r", [1, 2, 3], seeded(seed), delivered=(tuple(tokens[:cut]),), grammar=schema(PERSON))
        assert drain(engine(), moved)["r", 0][:2] == (tokens[cut:], reason)


def test_b42f_a_choice_that_was_whole_when_it_moved_ends_at_once() -> None:
    moved = EngineRequest("r", [1], seeded(1), delivered=(tuple(b"ab"),), grammar=grammar("choice", '["ab"]'))
    assert drain(engine(), moved)["r", 0][:2] == ([], FinishReason.COMPLETE)


def test_b42f_delivered_output_that_does_not_fit_is_an_error_of_that_request_alone() -> None:
    moved = EngineRequest("r", [1], seeded(1), delivered=(tuple(b"ax"),), grammar=grammar("choice", '["ab"]'))
    endings = drain(engine(), moved, EngineRequest("other", [1], seeded(1, max_tokens=5, ignore_eos=True)))
    assert endings["r", 0][1] is FinishReason.ERROR
    assert "doesn't fit the grammar" in (endings["r", 0][2] or "")
    assert len(endings["other", 0][0]) == 5


def test_a_dead_end_is_an_error_of_that_request_alone() -> None:
    banned = SamplingParams(max_tokens=9, seed=1, logit_bias={ord("b"): -100.0})
    endings = drain(
        engine(),
        EngineRequest("dead", [1], banned, grammar=grammar("choice", '["ab"]')),
        EngineRequest("other", [1], seeded(1, max_tokens=5, ignore_eos=True)),
    )
    assert endings["dead", 0][1] is FinishReason.ERROR
    assert len(endings["other", 0][0]) == 5


def test_min_tokens_hold_the_end_back_until_the_grammar_is_complete() -> None:
    tokens, reason, _ = drain(engine(), EngineRequest("r", [1], seeded(1, min_tokens=30), grammar=grammar("regex", "a{2,10}")))["r", 0]
    assert (bytes(tokens), reason) == (b"a" * 10, FinishReason.COMPLETE)


def test_the_end_token_ends_what_could_go_on() -> None:
    bias = {EOS: 100.0}
    tokens, reason, _ = drain(engine(), EngineRequest("r", [1], seeded(1, logit_bias=bias), grammar=grammar("regex", "a+")))["r", 0]
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert set(tokens) <= letters("a") | {EOS}
    assert tokens[0] == ord("a")


def test_max_tokens_cut_what_is_not_complete() -> None:
    tokens, reason, _ = drain(engine(), EngineRequest("r", [1], seeded(1, max_tokens=3), grammar=schema(PERSON)))["r", 0]
    assert (len(tokens), reason) == (3, FinishReason.LENGTH)


# --- the wire


async def test_no_grammar_is_none_and_every_kind_is_read() -> None:
    assert await compiled(types_pb2.SamplingParams(), COMPILER) is None
    for message, text in [
        (types_pb2.Grammar(json_schema='{"const": 7}'), "7"),
        (types_pb2.Grammar(json_object=True), "{}"),
        (types_pb2.Grammar(regex="a/b"), "a/b"),
        (types_pb2.Grammar(choice=types_pb2.Choices(choices=["né", "x"])), "né"),
        (types_pb2.Grammar(lark='start: "l"'), "l"),
    ]:
        result = await compiled(types_pb2.SamplingParams(grammar=message), COMPILER)
        assert result is not None
        state = result.start()
        for token in text.encode():
            state.advance(token)
        assert state.complete


@pytest.mark.parametrize(
    "message",
    [
        types_pb2.Grammar(),
        types_pb2.Grammar(json_schema="{"),
        types_pb2.Grammar(json_schema="[" * 100_000),
        types_pb2.Grammar(json_schema='{"type": "foo"}'),
        types_pb2.Grammar(regex="("),
        types_pb2.Grammar(choice=types_pb2.Choices()),
        types_pb2.Grammar(lark="start: nope"),
        types_pb2.Grammar(lark='start: "' + "a" * (1 << 20) + '"'),
    ],
    ids=lambda message: str(message)[:30],
)
async def test_a_grammar_that_can_not_be_used_is_blamed(message: types_pb2.Grammar) -> None:
    with pytest.raises(StatusError) as caught:
        await compiled(types_pb2.SamplingParams(grammar=message), COMPILER)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.violations] == ["sampling.grammar"]
    assert len(caught.value.message) < 400


async def test_a_worker_without_a_tokenizer_says_so() -> None:
    async with worker_harness.serving() as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_harness.hear(worker.stub.Generate(worker.request(grammar=types_pb2.Grammar(regex="a"))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no tokenizer" in str(caught.value.details())
        await worker.idle()
