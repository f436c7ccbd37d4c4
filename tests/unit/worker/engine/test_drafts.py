"""Drafts in the batcher, on a runner that reads tokens back through the block tables: what they may take, and what comes of them."""

import pytest

from services.worker.engine.batch import Batch, Span
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from services.worker.engine.speculation.speculator import Speculator
from tests.drafters import Guesser, always, fake_runners_token, often_right
from tests.engine_harness import Key, collect, greedy
from tests.fake_runner import EOS, fake_engine


def steps_of(engine: Engine, *requests: EngineRequest) -> list[list[TokenOutput]]:
    """All steps' outputs, the invariants checked behind each."""
    for request in requests:
        engine.add(request)
    steps = []
    while engine.has_work:
        steps.append(engine.step(0.0))
        engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    return steps


def tokens_of(steps: list[list[TokenOutput]]) -> dict[Key, list[int]]:
    whole: dict[Key, TokenOutput] = {}
    collect((output for step in steps for output in step), whole)
    return {key: output.token_ids for key, output in whole.items()}


class Watch:
    """The spans of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Span, ...]] = []

    def __call__(self, batch: Batch) -> None:
        self.steps.append(batch.spans)


def right(max_drafts: int) -> Speculator:
    return always(max_drafts, Guesser(fake_runners_token))


@pytest.mark.parametrize("max_drafts", [1, 3, 5, 8])
def test_right_drafts_come_out_k_and_one_at_a_time(max_drafts: int) -> None:
    expected = tokens_of(steps_of(fake_engine(), EngineRequest("r", [1, 2, 3], greedy(41))))
    engine = fake_engine(speculator=right(max_drafts))
    steps = steps_of(engine, EngineRequest("r", [1, 2, 3], greedy(41)))
    assert tokens_of(steps) == expected
    assert {len(outputs[0].token_ids) for outputs in steps[1:-1]} == {1 + max_drafts}
    for (output,) in steps[1:]:
        assert output.num_accepted == output.num_judged == len(output.token_ids) - 1
    stats = engine.stats()
    assert stats.num_drafts == len(steps) - 1
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_b42i_no_count_exceeds_the_tokens_whatever_the_drafts_and_wherever_the_end() -> None:
    """Also where an end token, a stop token or the limit cuts a run of right drafts, and where all are wrong."""
    wrong = Guesser(lambda sequence, drafted: (fake_runners_token(sequence, drafted) + 1) % 1000)
    for seed in range(60):
        stops = tuple(range(seed, 1000, 9))
        sampling = SamplingParams(max_tokens=3 + seed % 20, seed=seed, min_tokens=seed % 3, stop_token_ids=stops, ignore_eos=seed % 2 == 0)
        expected = tokens_of(steps_of(fake_engine(), EngineRequest("r", [seed], sampling)))
        for drafter in (wrong, Guesser(often_right), Guesser(fake_runners_token)):
            engine = fake_engine(speculator=always(8, drafter))
            outputs = [output for step in steps_of(engine, EngineRequest("r", [seed], sampling)) for output in step]
            assert tokens_of([outputs]) == expected
            assert all(0 <= o.num_accepted <= o.num_judged <= len(o.token_ids) for o in outputs)
            assert engine.stats().num_accepted_tokens == sum(o.num_accepted for o in outputs) <= len(expected["r", 0])
            assert not drafter.live, "an ended sequence is forgotten"


def test_log_probabilities_are_one_per_token_inside_a_run() -> None:
    engine = fake_engine(speculator=right(5))
    sampling = greedy(23, logprobs=0, stop_token_ids=(EOS,), min_tokens=9)
    for output in (output for step in steps_of(engine, EngineRequest("r", [5], sampling)) for output in step):
        assert [position.chosen.token_id for position in output.logprobs] == output.token_ids


@pytest.mark.parametrize("max_step_tokens", [1, 7, 512])
def test_b03_drafts_never_reach_beyond_the_context(max_step_tokens: int) -> None:
    """32 at once, three tokens short of the context, k = 8: each ends with exactly the room left."""
    watch = Watch()
    config = EngineConfig(num_blocks=32 * 8, block_size=4, max_step_tokens=max_step_tokens, max_sequences=32, max_model_len=30)
    engine = fake_engine(config, before_execute=watch, speculator=right(8))
    steps = steps_of(engine, *(EngineRequest(f"r{i}", [i] * 27, greedy(limit)) for i, limit in enumerate([None, 10**9] * 16)))
    assert {len(tokens) for tokens in tokens_of(steps).values()} == {3}
    assert {o.finish_reason for step in steps for o in step if o.finish_reason} == {FinishReason.LENGTH}
    spans = [span for step in watch.steps for span in step]
    assert max(span.end for span in spans) <= 29, "the last token's keys and values are never needed"
    assert max(sum(span.length for span in step) for step in watch.steps) <= max_step_tokens


def test_a_request_may_do_without() -> None:
    watch = Watch()
    engine = fake_engine(before_execute=watch, speculator=right(4))
    steps_of(engine, EngineRequest("off", [1], greedy(9, speculation=False)), EngineRequest("on", [2], greedy(9)))
    drafted = {span.sequence.request_id for step in watch.steps for span in step if span.draft.token_ids}
    assert drafted == {"on"}


def test_drafts_take_only_what_the_steps_budget_leaves_over() -> None:
    """A long prompt fills its steps; drafts come with it only where it ends."""
    watch = Watch()
    engine = fake_engine(EngineConfig(block_size=4, max_step_tokens=10), before_execute=watch, speculator=right(8))
    engine.add(EngineRequest("short", [1], greedy(60)))
    engine.step(0.0)
    engine.add(EngineRequest("long", list(range(40)), greedy(30)))
    for _ in range(5):
        engine.step(0.0)
    lengths = [[(span.sequence.request_id, span.length) for span in step] for step in watch.steps]
    assert lengths[1:5] == [[("short", 1), ("long", 9)]] * 4
    assert lengths[5] == [("short", 6), ("long", 4)]
    steps_of(engine)


def test_drafts_preempt_nobody_and_take_no_block_that_anyone_waits_for() -> None:
    """The same pool with and without: the same preemptions, and the same sequences let in."""
    requests = [EngineRequest(f"r{i}", [i] * 9, greedy(40)) for i in range(8)]
    config = EngineConfig(num_blocks=3 * 13, block_size=4, max_step_tokens=64, max_sequences=8)
    expected = tokens_of(steps_of(fake_engine(config), *requests))
    watch = Watch()
    engine = fake_engine(config, before_execute=watch, speculator=always(8, Guesser(often_right)))
    for request in requests:
        engine.add(request)
    steps = []
    while engine.has_work:
        steps.append(engine.step(0.0))
        engine.check_integrity()
        for sequence in engine.batcher.queue.running:
            assert len(sequence.block_table) <= max(
                -(-sequence.num_tokens // 4), -(-sequence.max_computed_tokens // 4) * (sequence.num_preemptions >= 5)
            )
    assert tokens_of(steps) == expected
    assert any(span.draft.token_ids for step in watch.steps for span in step)


def test_rejected_drafts_are_found_in_no_prefix_cache() -> None:
    """Blocks that only drafts have filled never get a key: who asks again computes, or finds the accepted."""
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=1), speculator=always(8, Guesser(often_right)))
    first = tokens_of(steps_of(engine, EngineRequest("a", [1, 2, 3], greedy(20))))["a", 0]
    for cut in range(1, 20):
        again = steps_of(engine, EngineRequest("b", [1, 2, 3, *first[:cut]], greedy(20 - cut)))
        assert tokens_of(again)["b", 0] == first[cut:]


def test_a_moved_request_and_many_choices() -> None:
    sampling = SamplingParams(max_tokens=25, seed=4, ignore_eos=True)
    expected = tokens_of(steps_of(fake_engine(), EngineRequest("r", [3, 4, 5], sampling, n=3)))
    delivered = tuple(tuple(expected["r", choice][: 7 * choice]) for choice in range(3))
    engine = fake_engine(speculator=always(5, Guesser(often_right)))
    rest = tokens_of(steps_of(engine, EngineRequest("r", [3, 4, 5], sampling, n=3, delivered=delivered)))
    assert {key: [*delivered[key[1]], *tokens] for key, tokens in rest.items()} == expected
