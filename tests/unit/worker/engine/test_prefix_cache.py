"""What is found again: prompts by their prefix, choices of one request, requests that go on elsewhere."""

import pytest

from services.worker.engine.config import EngineConfig
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
)
from tests.engine_harness import BIG, cached_tokens, drain, endings, endings_of, greedy, run, tokens_of
from tests.fake_runner import EOS, fake_engine


def test_prefix_hits_are_counted_and_leave_one_token_to_compute() -> None:
    engine = fake_engine(BIG)
    prompt = list(range(16))
    assert cached_tokens(engine, EngineRequest("cold", prompt, greedy(1))) == 0
    assert cached_tokens(engine, EngineRequest("same", prompt, greedy(1))) == 12
    assert cached_tokens(engine, EngineRequest("longer", [*prompt, 1], greedy(1))) == 16
    assert cached_tokens(engine, EngineRequest("other", [99, *prompt], greedy(1))) == 0
    stats = engine.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (16 + 16 + 17 + 17, 12 + 16)


def test_hits_count_when_a_request_starts_not_when_it_was_looked_at() -> None:
    """The waiting one saw cached blocks that were given away before there was room for it."""
    engine = fake_engine(EngineConfig(num_blocks=8, block_size=4, max_step_tokens=64))
    prompt = list(range(8))
    engine.add(EngineRequest("warm", prompt, greedy(1)))
    drain(engine)
    engine.add(EngineRequest("running", [99] * 20, greedy(12)))
    engine.step(0.0)
    engine.add(EngineRequest("waiting", [*prompt, 1], greedy(1)))
    outputs = [output for now in range(1, 20) for output in engine.step(float(now))]
    (cached, start) = next((o.num_cached_tokens, o.start_time) for o in outputs if o.request_id == "waiting")
    assert (cached, start) == (0, 12.0)
    assert engine.stats().num_prefix_hit_tokens == 0


def test_output_is_found_again_as_the_next_turns_prompt() -> None:
    engine = fake_engine(BIG)
    engine.add(EngineRequest("turn 1", [1, 2, 3], greedy(10)))
    tokens = tokens_of(drain(engine))["turn 1", 0]
    assert cached_tokens(engine, EngineRequest("turn 2", [1, 2, 3, *tokens, 4], greedy(1))) == 12


def test_b16_no_hits_across_salts() -> None:
    engine = fake_engine(BIG)
    prompt = list(range(16))
    for index, salt in enumerate([b"a", b"ab", b"", b"version", b"a\0"]):
        assert cached_tokens(engine, EngineRequest(f"r{index}", prompt, greedy(1), cache_salt=salt)) == 0
    assert cached_tokens(engine, EngineRequest("again", prompt, greedy(1), cache_salt=b"ab")) == 12


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, prefix_cache=False))
    prompt = list(range(16))
    for index in range(2):
        assert cached_tokens(engine, EngineRequest(f"r{index}", prompt, greedy(1))) == 0
        assert engine.stats().num_free_blocks == 64


# --- choices


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_step_tokens", [8, 512])
def test_choices_share_the_prompts_full_blocks_and_differ_behind_them(max_step_tokens: int, prefix_cache: bool) -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_step_tokens=max_step_tokens, prefix_cache=prefix_cache))
    engine.add(EngineRequest("r", list(range(18)), SamplingParams(max_tokens=6, seed=1, ignore_eos=True), n=4))
    while engine.stats().num_running < 4:
        engine.step(0.0)
        engine.check_integrity()
    tables = [sequence.block_table for sequence in engine.batcher.queue.running]
    assert len({tuple(table[:4]) for table in tables}) == 1, "one copy of the full blocks"
    assert len({table[4] for table in tables}) == 4, "a tail for each"
    assert engine.progress() == [("r", sum(s.num_output_tokens for s in engine.batcher.queue.running), len({b for t in tables for b in t}))]
    computed = engine.stats().num_computed_tokens
    assert computed <= 18 + 3 * (2 + 6) + 4 * 6, "the prompt is computed once"
    drain(engine)


def test_choices_are_the_same_alone_and_together() -> None:
    request = EngineRequest("r", list(range(18)), SamplingParams(max_tokens=9, seed=1), n=4)
    together = endings_of([request])
    assert len({tuple(tokens) for tokens, _ in together.values()}) == 4
    for index in range(4):
        only = EngineRequest(**{**vars(request), "finished_choices": frozenset(range(4)) - {index}})
        assert endings_of([only]) == {("r", index): together["r", index]}


# --- moves


def test_delivered_output_is_continued_not_repeated() -> None:
    request = EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=12, min_tokens=5, seed=4), n=2)
    whole = endings_of([request])
    for cut in (1, 4, 11):
        delivered = tuple(tuple(whole["r", index][0][:cut]) for index in range(2))
        rest = run(fake_engine(BIG), [EngineRequest(**{**vars(request), "delivered": delivered})])
        assert {output.first_position for output in rest.values()} == {cut}
        assert {key: ([*delivered[key[1]], *tokens], reason) for key, (tokens, reason) in endings(rest).items()} == whole


def test_a_choice_that_was_complete_when_it_moved_ends_at_once() -> None:
    engine = fake_engine(BIG)
    sampling = SamplingParams(max_tokens=3, temperature=0)
    engine.add(EngineRequest("r", [1], sampling, n=3, delivered=((1, 2, 3), (EOS,)), finished_choices=frozenset({2})))
    outputs = engine.step(0.0)
    assert [(o.choice_index, o.first_position, o.token_ids, o.finish_reason) for o in outputs] == [
        (0, 3, [], FinishReason.LENGTH),
        (1, 1, [], FinishReason.STOP),
    ]
    assert not engine.has_work


def test_with_every_choice_finished_there_is_nothing_to_do() -> None:
    engine = fake_engine(BIG)
    engine.add(EngineRequest("r", [1], greedy(3), n=2, finished_choices=frozenset({0, 1})))
    assert not engine.has_work
