"""Log-probabilities of prompts: each position once, few at a time, whatever happens meanwhile."""

import pytest

from services.worker.engine.admission import Cause
from services.worker.engine.batch import Batch
from services.worker.engine.batcher import MAX_SCORED_ROWS
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
)
from tests.engine_harness import BIG, drain, greedy
from tests.fake_runner import fake_engine


@pytest.mark.parametrize("max_step_tokens", [1, 3, 512])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_b28_scoring_yields_each_prompt_position_once(max_step_tokens: int, max_tokens: int) -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_step_tokens=max_step_tokens))
    prompt = list(range(21))
    engine.add(EngineRequest("warm", prompt, greedy(1)))
    drain(engine)
    engine.add(EngineRequest("r", prompt, greedy(max_tokens, prompt_logprobs=2), n=2))
    scored, tokens, ends = [], [], 0
    while engine.has_work:
        for output in engine.step(0.0):
            assert not (output.prompt_logprobs and output.choice_index)
            assert not (output.prompt_logprobs and tokens), "the prompt comes before the output"
            scored += output.prompt_logprobs
            tokens += output.token_ids
            ends += output.finish_reason is FinishReason.LENGTH
    assert [position.chosen.token_id for position in scored] == prompt
    assert [position.has_logprob for position in scored] == [False] + [True] * 20
    assert (len(tokens), ends) == (2 * max_tokens, 2)


def test_b33_few_rows_are_scored_at_once() -> None:
    rows: list[int] = []

    def watch(batch: Batch) -> None:
        rows.append(sum(len(span.scored) for span in batch.spans))

    engine = fake_engine(EngineConfig(num_blocks=1024, block_size=4, max_step_tokens=4096, max_sequences=64), before_execute=watch)
    for index in range(4):
        engine.add(EngineRequest(f"r{index}", [index] * 600, greedy(0, prompt_logprobs=20)))
    drain(engine)
    assert sum(rows) == 4 * 599
    assert max(rows) == MAX_SCORED_ROWS


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_scoring_survives_preemption_without_repeats(prefix_cache: bool) -> None:
    engine = fake_engine(EngineConfig(num_blocks=14, block_size=2, max_step_tokens=3, prefix_cache=prefix_cache))
    engine.add(EngineRequest("old", [1, 2], greedy(12)))
    engine.step(0.0)
    engine.add(EngineRequest("score", list(range(12)), greedy(4, prompt_logprobs=0)))
    sequence, scored = engine.batcher.queue.waiting[0], []
    while engine.has_work:
        for output in engine.step(0.0):
            scored += output.prompt_logprobs
        if len(scored) == 7 and not sequence.num_preemptions:
            engine.batcher.admission.preempt(sequence, Cause.CAPACITY, 0.0)
    assert [position.chosen.token_id for position in scored] == list(range(12))
    assert sequence.num_preemptions >= 1


def test_max_tokens_0_without_scores_ends_without_a_step_of_the_model() -> None:
    def never(batch: Batch) -> None:
        raise AssertionError(batch)

    engine = fake_engine(BIG, before_execute=never)
    engine.add(EngineRequest("r", [1], greedy(0)))
    (output,) = engine.step(0.0)
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
