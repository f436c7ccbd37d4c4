"""The batcher on a runner that reads tokens back through the block tables: nothing that happens to a request changes its tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.worker.engine.admission import Cause
from services.worker.engine.batch import Batch
from services.worker.engine.batcher import MAX_SCORED_ROWS
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
    SequenceError,
    TokenOutput,
)
from services.worker.engine.sequence import MAX_PREEMPTIONS
from tests.drafters import Guesser, always, often_right
from tests.engine_harness import Ending, Key, alone, collect, drain, endings, greedy, run, some_requests, tokens_of
from tests.fake_runner import EOS, VOCAB_SIZE, fake_engine

BIG = EngineConfig(num_blocks=512, block_size=4, max_step_tokens=64, max_sequences=32)


def endings_of(requests: list[EngineRequest], config: EngineConfig = BIG, max_drafts: int = 0) -> dict[Key, Ending]:
    """With `max_drafts`, drafts that are wrong by turns: nothing that they do may show."""
    return endings(run(fake_engine(config, speculator=always(max_drafts, Guesser(often_right)) if max_drafts else None), requests))


@given(
    some_requests(),
    st.integers(14, 40),
    st.integers(1, 40),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 40),
    st.sampled_from([0, 1, 6, 100]),
    st.sampled_from([1, 3, 256]),
    st.sampled_from([0, 1, 3, 5, 8]),
)
@settings(max_examples=160, deadline=None)
def test_any_company_any_pool_any_chunk_any_drafts_same_tokens(
    requests: list[EngineRequest],
    num_blocks: int,
    max_step_tokens: int,
    max_sequences: int,
    prefix_cache: bool,
    host_blocks: int,
    swap_blocks: int,
    max_step_copies: int,
    max_drafts: int,
) -> None:
    """14 blocks of 4 hold any one of them: everything else is preemption, chunking, prefix hits of either tier and waiting."""
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        host_blocks=host_blocks,
        swap_blocks=swap_blocks,
        max_step_copies=max_step_copies,
    )
    together = endings_of(requests, config, max_drafts)
    assert together == alone(requests)
    assert len(together) == sum(request.n for request in requests)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are aborted and are stepped in any order, on a pool far too small for all."""

    @initialize(
        prefix_cache=st.booleans(),
        max_step_tokens=st.sampled_from([1, 3, 16, 200]),
        host_blocks=st.sampled_from([0, 3, 40]),
        swap_blocks=st.sampled_from([0, 5, 40]),
        max_step_copies=st.sampled_from([1, 2, 256]),
        max_drafts=st.sampled_from([0, 1, 8]),
    )
    def build(
        self, prefix_cache: bool, max_step_tokens: int, host_blocks: int, swap_blocks: int, max_step_copies: int, max_drafts: int
    ) -> None:
        self.engine = fake_engine(
            EngineConfig(
                num_blocks=16,
                block_size=4,
                max_step_tokens=max_step_tokens,
                max_sequences=5,
                prefix_cache=prefix_cache,
                host_blocks=host_blocks,
                swap_blocks=swap_blocks,
                max_step_copies=max_step_copies,
            ),
            speculator=always(max_drafts, Guesser(often_right)) if max_drafts else None,
        )
        self.added: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.now = 0.0
        self.outputs: dict[Key, TokenOutput] = {}

    @rule(requests=some_requests(max_size=2))
    def add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            fresh = EngineRequest(**{**vars(request), "request_id": f"r{len(self.added)}"})
            self.engine.add(fresh)
            self.added[fresh.request_id] = fresh

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.added)))
        self.engine.abort(request_id)
        assert request_id not in {live for live, _, _ in self.engine.progress()}
        self.engine.check_integrity()
        if any(
            (request_id, c) not in self.outputs or self.outputs[request_id, c].finish_reason is None
            for c in range(self.added[request_id].n)
        ):
            self.aborted.add(request_id)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 5.0  # as good as the time in which a weight doubles
            outputs = self.engine.step(self.now)
            assert not self.aborted & {output.request_id for output in outputs}, "news of an aborted request"
            collect(outputs, self.outputs)
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        drain(self.engine, self.outputs)
        whole = [request for request_id, request in self.added.items() if request_id not in self.aborted]
        assert {key: ending for key, ending in endings(self.outputs).items() if key[0] not in self.aborted} == alone(whole)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_b08_preempted_five_times_and_still_whole() -> None:
    """A pool for about three of eight long requests."""
    requests = [EngineRequest(f"r{i}", [i] * 9, greedy(40)) for i in range(8)]
    config = EngineConfig(num_blocks=3 * 13, block_size=4, max_step_tokens=64, max_sequences=8)
    engine = fake_engine(config)
    whole = run(engine, requests)
    assert endings(whole) == alone(requests)
    assert all(len(output.token_ids) == 40 for output in whole.values())
    counts = [output.num_preemptions for output in whole.values()]
    assert sum(counts) == engine.stats().num_preemptions > 0
    assert max(counts) <= MAX_PREEMPTIONS


def test_b26_the_youngest_gives_way_keeps_its_place_and_at_most_five_times() -> None:
    engine = fake_engine(EngineConfig(num_blocks=12, block_size=1, max_step_tokens=64, max_sequences=8))
    for index in range(6):
        engine.add(EngineRequest(f"r{index}", [index, index], greedy(9)))
    order: list[str] = []
    victims: dict[str, int] = {}
    while engine.has_work:
        running = list(engine.batcher.queue.running)
        outputs = engine.step(0.0)
        engine.check_integrity()
        order += [output.request_id for output in outputs if output.finish_reason]
        for sequence in running:
            victims[sequence.request_id] = sequence.num_preemptions
    assert order == [f"r{index}" for index in range(6)], "equals end in the order in which they came"
    assert victims["r0"] == 0, "the oldest never gives way to its equals"
    assert 0 < max(victims.values()) <= MAX_PREEMPTIONS


def test_one_that_was_preempted_too_often_waits_for_all_it_can_need() -> None:
    engine = fake_engine(EngineConfig(num_blocks=10, block_size=1, max_step_tokens=64))
    engine.add(EngineRequest("often", [1, 2], greedy(7)))
    engine.batcher.queue.waiting[0].num_preemptions = MAX_PREEMPTIONS
    engine.add(EngineRequest("young", [3], greedy(9)))
    engine.batcher.schedule(0.0)
    often = engine.batcher.queue.running[0]
    assert len(often.block_table) == often.max_computed_tokens == 8
    whole = drain(engine)
    assert often.num_preemptions == MAX_PREEMPTIONS
    assert {key[0]: len(tokens) for key, tokens in tokens_of(whole).items()} == {"often": 7, "young": 9}


def test_one_that_is_fully_reserved_gives_way_to_nobody() -> None:
    engine = fake_engine(EngineConfig(num_blocks=12, block_size=1, max_step_tokens=64))
    engine.add(EngineRequest("old", [1], greedy(10)))
    engine.add(EngineRequest("often", [2, 3], greedy(6)))
    engine.batcher.queue.waiting[1].num_preemptions = MAX_PREEMPTIONS
    counts = {}
    while engine.has_work:
        counts |= {output.request_id: output.num_preemptions for output in engine.step(0.0)}
        engine.check_integrity()
    assert counts == {"old": 1, "often": MAX_PREEMPTIONS}


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, ["small", "running", "large"]), (60.0, ["running", "large", "small"])])
def test_a_small_one_overtakes_a_large_one_until_that_has_waited_for_long(seconds: float, expected: list[str]) -> None:
    engine = fake_engine(EngineConfig(num_blocks=8, block_size=4, max_step_tokens=64))
    engine.add(EngineRequest("running", [1] * 12, greedy(5)))
    engine.step(0.0)
    engine.add(EngineRequest("large", [2] * 20, greedy(1)))
    engine.step(0.0)
    engine.add(EngineRequest("small", [3, 3], greedy(1)))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step(seconds) if output.finish_reason]
    assert order == expected


def test_a_lower_class_gives_way_first() -> None:
    engine = fake_engine(EngineConfig(num_blocks=8, block_size=1, max_step_tokens=64))
    engine.add(EngineRequest("batch", [1, 2], greedy(6), latency_class=3))
    engine.step(0.0)
    engine.add(EngineRequest("realtime", [3, 4], greedy(6), latency_class=1))
    while engine.has_work:
        if any(output.finish_reason for output in engine.step(0.0) if output.request_id == "realtime"):
            break
    (batch,) = [group.sequences[0] for group in engine.batcher.queue.requests.values()]
    assert batch.num_preemptions >= 1
    drain(engine)


def test_classes_then_arrival_decide_who_is_admitted() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_sequences=1))
    for index, latency_class in enumerate([3, 2, 1, 2, 1]):
        engine.add(EngineRequest(f"r{index}", [index], greedy(1), latency_class=latency_class))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step(0.0)]
    assert order == ["r2", "r4", "r1", "r3", "r0"]


def test_decoding_goes_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    spans: list[list[tuple[str, int]]] = []

    def watch(batch: Batch) -> None:
        spans.append([(span.sequence.request_id, span.length) for span in batch.spans])

    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_step_tokens=10), before_execute=watch)
    engine.add(EngineRequest("short", [1], greedy(8)))
    engine.step(0.0)
    engine.add(EngineRequest("long", list(range(40)), greedy(1)))
    drain(engine)
    assert spans[1:6] == [[("short", 1), ("long", 9)]] * 4 + [[("short", 1), ("long", 4)]]


@pytest.mark.parametrize("max_step_tokens", [1, 7, 512])
def test_b03_ends_at_exactly_the_room_left(max_step_tokens: int) -> None:
    """32 at once, three tokens short of the context."""
    config = EngineConfig(num_blocks=32 * 8, block_size=4, max_step_tokens=max_step_tokens, max_sequences=32, max_model_len=30)
    requests = [EngineRequest(f"r{i}", [i] * 27, greedy(max_tokens)) for i, max_tokens in enumerate([None, 10**9] * 16)]
    for tokens, reason in endings_of(requests, config).values():
        assert (len(tokens), reason) == (3, FinishReason.LENGTH)


def test_b29_prompts_at_the_edge_of_the_context() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_model_len=32))
    engine.add(EngineRequest("one left", [1] * 31, greedy(None)))
    for length in (32, 33, 320):
        with pytest.raises(RequestTooLarge, match="context of 32"):
            engine.add(EngineRequest(f"{length}", [1] * length, greedy(None)))
    engine.add(EngineRequest("score", [1] * 32, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    whole = endings(drain(engine))
    assert len(whole["one left", 0][0]) == 1
    assert whole["score", 0] == ([], FinishReason.LENGTH)


def test_b23_what_can_never_fit_is_refused_and_holds_nobody_up() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_model_len=4096))
    with pytest.raises(RequestTooLarge, match=r"need 80 blocks of 4; there are 64"):
        engine.add(EngineRequest("big", [1] * 300, greedy(21)))
    for index in range(20):
        engine.add(EngineRequest(f"r{index}", [index] * 4, greedy(4)))
    assert len(drain(engine)) == 20


def test_the_largest_that_fits_does() -> None:
    """The last token's keys and values are never needed: 64 blocks of 4 carry 257 tokens."""
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=4096)
    ((tokens, _),) = endings_of([EngineRequest("r", [1] * 7, greedy(250))], config).values()
    assert len(tokens) == 250


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),  # B27
        ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"n": 0}, "n is 0"),
        ({"n": 1, "delivered": ((1,), (2,))}, "delivered has 2"),
        ({"delivered": ((VOCAB_SIZE,),)}, "delivered"),
        ({"sampling": SamplingParams(max_tokens=-1)}, "max_tokens is -1"),  # B28
        ({"sampling": SamplingParams(max_tokens=3, min_tokens=4)}, "min_tokens is 4"),
        ({"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias"),  # B30
        ({"sampling": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={1: float("nan")})}, r"logit_bias\[1\] is nan"),
        ({"sampling": SamplingParams(stop_token_ids=(2**31,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature is nan"),  # B31
        ({"sampling": SamplingParams(temperature=float("inf"))}, "temperature is inf"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature is -1"),
        ({"sampling": SamplingParams(top_p=1.0000001)}, "top_p"),  # B32
        ({"sampling": SamplingParams(top_k=-2)}, "top_k is -2"),
        ({"sampling": SamplingParams(repetition_penalty=0)}, "repetition_penalty is 0"),
    ],
)
def test_bad_values_are_refused_by_name_and_a_good_request_works_on(fields: dict[str, object], words: str) -> None:
    engine = fake_engine(BIG)
    with pytest.raises(InvalidRequest, match=words):
        engine.add(EngineRequest(**{"request_id": "bad", "prompt_token_ids": [1], **fields}))  # type: ignore[arg-type]
    assert not engine.has_work
    engine.add(EngineRequest("good", [1], greedy(2)))
    assert len(tokens_of(drain(engine))["good", 0]) == 2


def test_b42h_huge_min_tokens_ends_at_the_room_left() -> None:
    config = EngineConfig(num_blocks=16, block_size=4, max_model_len=32)
    request = EngineRequest("r", [1], SamplingParams(max_tokens=None, min_tokens=10**9, temperature=0))
    ((tokens, reason),) = endings_of([request], config).values()
    assert (len(tokens), reason) == (31, FinishReason.LENGTH)
    assert EOS not in tokens


def test_a_live_id_is_refused_and_an_ended_one_is_not() -> None:
    engine = fake_engine(BIG)
    engine.add(EngineRequest("r", [1], greedy(1)))
    with pytest.raises(InvalidRequest, match="live"):
        engine.add(EngineRequest("r", [1], greedy(1)))
    drain(engine)
    engine.add(EngineRequest("r", [1], greedy(1)))
    drain(engine)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_and_stop_tokens_end_a_choice_and_come_with_it(ignore_eos: bool) -> None:
    stops = tuple(range(0, VOCAB_SIZE, 10))
    sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=ignore_eos, stop_token_ids=stops)
    ((tokens, reason),) = endings_of([EngineRequest("r", [5], sampling)]).values()
    assert reason is FinishReason.STOP
    assert tokens[-1] in stops or (tokens[-1] == EOS and not ignore_eos)
    assert not set(tokens[:-1]) & set(stops)


@pytest.mark.parametrize("prompt", range(10))
def test_min_tokens_holds_the_end_back(prompt: int) -> None:
    stops = tuple(range(VOCAB_SIZE - 50))
    sampling = SamplingParams(max_tokens=200, min_tokens=6, temperature=0, stop_token_ids=stops)
    ((tokens, reason),) = endings_of([EngineRequest("r", [prompt], sampling)]).values()
    assert all(token not in stops and token != EOS for token in tokens[:6])
    assert reason is FinishReason.STOP
    assert tokens[-1] in stops


# --- prefix cache


def _cached(engine: Engine, request: EngineRequest) -> int:
    engine.add(request)
    cached = None
    while engine.has_work:
        for output in engine.step(0.0):
            cached = output.num_cached_tokens
    assert cached is not None
    return cached


def test_prefix_hits_are_counted_and_leave_one_token_to_compute() -> None:
    engine = fake_engine(BIG)
    prompt = list(range(16))
    assert _cached(engine, EngineRequest("cold", prompt, greedy(1))) == 0
    assert _cached(engine, EngineRequest("same", prompt, greedy(1))) == 12
    assert _cached(engine, EngineRequest("longer", [*prompt, 1], greedy(1))) == 16
    assert _cached(engine, EngineRequest("other", [99, *prompt], greedy(1))) == 0
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
    assert _cached(engine, EngineRequest("turn 2", [1, 2, 3, *tokens, 4], greedy(1))) == 12


def test_b16_no_hits_across_salts() -> None:
    engine = fake_engine(BIG)
    prompt = list(range(16))
    for index, salt in enumerate([b"a", b"ab", b"", b"version", b"a\0"]):
        assert _cached(engine, EngineRequest(f"r{index}", prompt, greedy(1), cache_salt=salt)) == 0
    assert _cached(engine, EngineRequest("again", prompt, greedy(1), cache_salt=b"ab")) == 12


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, prefix_cache=False))
    prompt = list(range(16))
    for index in range(2):
        assert _cached(engine, EngineRequest(f"r{index}", prompt, greedy(1))) == 0
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


# --- scoring


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


# --- faults


def test_b11_an_error_of_one_request_leaves_the_others_alone() -> None:
    steps = 0

    def fail_once(batch: Batch) -> None:
        nonlocal steps
        steps += 1
        if steps >= 10 and any(span.sequence.request_id == "r2" for span in batch.spans):
            raise SequenceError("r2", 0, "cosmic ray")

    requests = [EngineRequest(f"r{i}", [i], greedy(20), n=2) for i in range(6)]
    engine = fake_engine(BIG, before_execute=fail_once)
    whole = run(engine, requests)
    errors = {key: output.error for key, output in whole.items() if output.finish_reason is FinishReason.ERROR}
    assert errors == {("r2", 0): "cosmic ray", ("r2", 1): "cosmic ray"}
    others = [request for request in requests if request.request_id != "r2"]
    assert {key: ending for key, ending in endings(whole).items() if key[0] != "r2"} == alone(others)


def test_what_a_failed_request_computed_serves_no_one() -> None:
    prompt = list(range(16))

    def fail(batch: Batch) -> None:
        if batch.spans[0].sequence.num_output_tokens == 2 and batch.spans[0].sequence.request_id == "bad":
            raise SequenceError("bad", 0, "NaN")

    engine = fake_engine(BIG, before_execute=fail)
    engine.add(EngineRequest("bad", prompt, greedy(8)))
    drain(engine)
    assert _cached(engine, EngineRequest("good", prompt, greedy(1))) == 0


def test_a_fault_of_the_runner_is_the_engines() -> None:
    def fault(batch: Batch) -> None:
        raise MemoryError("device lost")

    engine = fake_engine(BIG, before_execute=fault)
    engine.add(EngineRequest("r", [1], greedy(1)))
    with pytest.raises(MemoryError, match="device lost"):
        engine.step(0.0)


def test_abort_frees_blocks_at_once_in_every_state() -> None:
    engine = fake_engine(EngineConfig(num_blocks=16, block_size=4, max_step_tokens=8, max_sequences=2))
    engine.add(EngineRequest("decode", [1], greedy(20)))
    engine.step(0.0)
    engine.add(EngineRequest("prefill", list(range(30)), greedy(4)))
    engine.add(EngineRequest("queued", [3], greedy(4), latency_class=3))
    engine.step(0.0)
    assert [(s.request_id, s.num_computed_tokens) for s in engine.batcher.queue.running] == [("decode", 2), ("prefill", 7)]
    for request_id in ("queued", "prefill", "decode", "decode", "never there"):
        engine.abort(request_id)
        engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    assert not engine.has_work
    assert engine.step(0.0) == []
