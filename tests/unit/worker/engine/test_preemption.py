"""Preemption comes at once, from whom it may, and what was interrupted goes on bit for bit, on the stand-in and on real decoders."""

import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine.admission import Cause
from services.worker.engine.batch import Batch
from services.worker.engine.config import EngineConfig
from services.worker.engine.deadlines import MAX_SKIPS
from services.worker.engine.engine import Engine
from services.worker.engine.loader import load
from services.worker.engine.request import EngineRequest, SamplingParams, TokenOutput
from services.worker.engine.sequence import MAX_PREEMPTIONS
from tests.drafters import Guesser, always, often_right
from tests.engine_harness import Ending, Key, alone, collect, drain, endings, engine_on, greedy, run
from tests.fake_runner import VOCAB_SIZE, FakeRunner, fake_engine
from tests.tiny_models import VOCAB, AnyDecoder, load_native, save_model

REALTIME, STANDARD, BATCH = 1, 2, 3
SHARED = list(range(10, 31))  # victims and those they give way to begin alike


def some_load(rng: random.Random) -> list[EngineRequest]:
    """Batch requests of every kind, and realtime ones that take their room."""
    requests = []
    for index in range(9):
        sampling = SamplingParams(
            max_tokens=rng.randint(4, 20),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            ignore_eos=True,
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        prompt = SHARED[: rng.choice([0, 8, 21])] + [rng.randrange(100) for _ in range(rng.randint(1, 9))]
        latency_class = REALTIME if index % 3 == 2 else rng.choice([STANDARD, BATCH])
        requests.append(EngineRequest(f"r{index}", prompt, sampling, n=rng.choice([1, 1, 2]), latency_class=latency_class))
    return requests


def run_with_preemptions(engine: Engine, requests: Seq[EngineRequest], rng: random.Random, chance: float) -> dict[Key, TokenOutput]:
    """Requests come at random steps, and beside those that the engine preempts for them others are preempted at random."""
    whole: dict[Key, TokenOutput] = {}
    coming = sorted((rng.randint(0, 20), index) for index in range(len(requests)))
    step = 0
    while coming or engine.has_work:
        while coming and coming[0][0] <= step:
            engine.add(requests[coming.pop(0)[1]])
        running = [sequence for sequence in engine.batcher.queue.running if not sequence.is_reserved]
        if running and rng.random() < chance:
            engine.batcher.admission.preempt(rng.choice(running), Cause.CAPACITY, float(step))
        collect(engine.step(float(step)), whole)
        engine.check_integrity()
        step += 1
    return drain(engine, whole)


def full(whole: dict[Key, TokenOutput]) -> dict[Key, tuple[object, ...]]:
    """All that a client sees of each choice."""
    return {key: (o.token_ids, o.finish_reason, o.logprobs, o.prompt_logprobs) for key, o in whole.items()}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("swap_blocks", "host_blocks"), [(0, 0), (9, 0), (60, 0), (60, 20), (9, 20)])
def test_two_thousand_random_points_on_a_runner_that_reads_back_what_was_written(
    swap_blocks: int, host_blocks: int, prefix_cache: bool
) -> None:
    config = EngineConfig(
        num_blocks=26,
        block_size=4,
        max_step_tokens=24,
        max_sequences=5,
        prefix_cache=prefix_cache,
        swap_blocks=swap_blocks,
        host_blocks=host_blocks,
        max_step_copies=3,
    )
    rng = random.Random(swap_blocks + host_blocks)
    num_points = num_swaps = 0
    for number in range(1000):
        speculator = always(5, Guesser(often_right)) if number % 3 == 0 else None
        engine = fake_engine(config, speculator=speculator)
        requests = some_load(rng)
        assert endings(run_with_preemptions(engine, requests, rng, 0.2)) == alone(requests)
        num_points += engine.stats().num_preemptions
        num_swaps += engine.stats().num_swaps
        if num_points >= 200:
            break
    assert num_points >= 200
    assert (num_swaps == 0) == (swap_blocks == 0)
    assert (num_swaps > 0.9 * num_points) == (swap_blocks == 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module", params=["native", "torch"])
def decoder(request: pytest.FixtureRequest, folder: Path) -> AnyDecoder:
    return load_native(folder, num_threads=1) if request.param == "native" else load(folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("swap_blocks", [80, 6])  # nearly all is swapped, or most is computed again
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8", "fp8"])
def test_f28_a_thousand_random_points_on_real_decoders(decoder: AnyDecoder, kv_format: str, swap_blocks: int) -> None:
    rng = random.Random(kv_format)
    sizes: dict[str, object] = {"block_size": 4, "kv_format": kv_format, "eos_token_ids": ()}
    requests = [replace(r, prompt_token_ids=[token % VOCAB for token in r.prompt_token_ids]) for r in some_load(rng)]
    undisturbed = engine_on(decoder, num_blocks=300, **sizes)
    expected = full(run(undisturbed, requests))
    assert undisturbed.stats().num_preemptions == 0
    engine = engine_on(decoder, num_blocks=26, max_sequences=5, swap_blocks=swap_blocks, max_step_tokens=24, max_step_copies=4, **sizes)
    while engine.stats().num_preemptions < 63:
        assert full(run_with_preemptions(engine, requests, rng, 0.4)) == expected
    assert engine.stats().num_swaps > (50 if swap_blocks == 80 else 0)


# --- at once


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        pytest.param(EngineConfig(num_blocks=256, block_size=4, max_sequences=8), [([index] * 5, 60) for index in range(8)], id="slots"),
        pytest.param(EngineConfig(num_blocks=32, block_size=4, max_sequences=64), [([index] * 27, 4) for index in range(4)], id="blocks"),
        pytest.param(EngineConfig(num_blocks=32, block_size=4, max_sequences=64), [([1] * 118, 10)], id="all blocks in one hand"),
    ],
)
@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_the_first_realtime_token_comes_within_three_steps(
    config: EngineConfig, batch: list[tuple[list[int], int]], swap_blocks: int
) -> None:
    engine = fake_engine(replace(config, swap_blocks=swap_blocks, max_step_tokens=64))
    requests = [EngineRequest(f"b{i}", prompt, greedy(count), latency_class=BATCH) for i, (prompt, count) in enumerate(batch)]
    for request in requests:
        engine.add(request)
    whole: dict[Key, TokenOutput] = {}
    while any(s.num_output_tokens < 1 for s in engine.batcher.queue.running) or engine.batcher.queue.waiting:
        collect(engine.step(0.0), whole)
    now = EngineRequest("now", [7] * 40, greedy(3), latency_class=REALTIME)
    engine.add(now)
    for _ in range(3):
        collect(engine.step(0.0), whole)
    assert whole["now", 0].token_ids
    assert endings(drain(engine, whole)) == alone([*requests, now])
    assert engine.stats().num_class_preemptions >= 1


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    """Ten blocks are the standard request's own, and the batch request's six are too few."""
    engine = fake_engine(EngineConfig(num_blocks=16, block_size=4, max_step_tokens=64))
    requests = [
        EngineRequest("standard", [1] * 38, greedy(2), latency_class=STANDARD),
        EngineRequest("batch", [2] * 20, greedy(3), latency_class=BATCH),
        EngineRequest("large", [3] * 40, greedy(1), latency_class=STANDARD),
    ]
    for request in requests:
        engine.add(request)
        engine.step(0.0)
    assert engine.stats().num_preemptions == 0
    drain(engine)


def test_with_preemption_off_the_urgent_only_go_first() -> None:
    config = EngineConfig(num_blocks=64, block_size=4, max_sequences=2, class_preemption=False)
    engine = fake_engine(config)
    for index in range(4):
        engine.add(EngineRequest(f"b{index}", [index], greedy(9), latency_class=BATCH))
    engine.step(0.0)
    engine.add(EngineRequest("now", [7], greedy(2), latency_class=REALTIME))
    order: list[str] = []
    while engine.has_work:
        order += [output.request_id for output in engine.step(0.0) if output.finish_reason]
    assert order == ["b0", "b1", "now", "b2", "b3"]
    assert engine.stats().num_preemptions == 0


def test_a_victim_comes_back_without_computing_anything_again() -> None:
    """Its device blocks are overwritten meanwhile: all of it comes from the host."""
    engine = fake_engine(EngineConfig(num_blocks=12, block_size=4, max_step_tokens=64, max_sequences=4, swap_blocks=16))
    victim = EngineRequest("victim", list(range(22)), SamplingParams(max_tokens=20, seed=3, ignore_eos=True), latency_class=BATCH)
    now = EngineRequest("now", [99] * 44, greedy(4), latency_class=REALTIME)
    engine.add(victim)
    whole: dict[Key, TokenOutput] = {}
    for _ in range(4):
        collect(engine.step(0.0), whole)
    engine.add(now)
    assert endings(drain(engine, whole)) == alone([victim, now])
    stats = engine.stats()
    assert stats.num_computed_tokens == 22 + 19 + 44 + 3
    assert (stats.num_swaps, stats.num_swapped_tokens, stats.num_swapped_blocks) == (1, 25, 7)
    assert stats.num_copied_in_blocks == 7


def test_where_the_host_is_full_a_victim_computes_again() -> None:
    engine = fake_engine(EngineConfig(num_blocks=12, block_size=4, max_step_tokens=64, max_sequences=4, swap_blocks=6))
    victim = EngineRequest("victim", list(range(22)), greedy(20), latency_class=BATCH)
    now = EngineRequest("now", [99] * 40, greedy(4), latency_class=REALTIME)
    engine.add(victim)
    for _ in range(4):
        engine.step(0.0)
    assert endings(run(engine, [now]))["now", 0] == alone([now])["now", 0]
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_swaps, stats.num_swapped_blocks) == (1, 0, 0)
    assert stats.num_computed_tokens > 22 + 19 + 40 + 3


class _Slow(FakeRunner):
    """A runner on which a page takes so long to copy, and a token a second to compute."""

    def __init__(self, config: EngineConfig, copy_seconds: float) -> None:
        super().__init__(config.num_blocks, config.block_size, host_blocks=config.num_host_slots, before_execute=self._compute)
        self.now = 0.0
        self.copy_seconds = copy_seconds

    def copy(self, batch: Batch) -> None:
        self.now += self.copy_seconds * batch.num_copies
        super().copy(batch)

    def _compute(self, batch: Batch) -> None:
        self.now += batch.num_tokens


@pytest.mark.parametrize(("copy_seconds", "device", "swaps"), [(1.9, "cpu", True), (2.1, "cpu", False), (2.1, "cuda", True)])
def test_swap_or_recompute_is_the_cheaper_one_where_both_are_exact(copy_seconds: float, device: str, swaps: bool) -> None:
    """There and back for a block of 4 tokens: 3.8 or 4.2 seconds against 4. Where rows depend on the batch there is no choice."""
    config = EngineConfig(num_blocks=12, block_size=4, max_step_tokens=64, max_sequences=4, swap_blocks=16, device=device)
    runner = _Slow(config, copy_seconds)
    engine = Engine(runner, config, vocab_size=VOCAB_SIZE, clock=lambda: runner.now)
    for number in range(2):
        engine.add(EngineRequest(f"victim{number}", [number, *range(22)], greedy(20), latency_class=BATCH))
        for _ in range(4):
            engine.step(0.0)
        run(engine, [EngineRequest(f"now{number}", [99 - number] * 40, greedy(4), latency_class=REALTIME)])
    assert engine.stats().num_swaps == 1 + swaps, "the first time nothing is measured yet"


@pytest.mark.parametrize("swap_blocks", [0, 200])
def test_f26_endless_realtime_load_leaves_batch_its_share(swap_blocks: int) -> None:
    """A step takes .1 s. Realtime requests keep every slot wanted; the batch request takes 4 s alone, and 60 s more at most."""
    config = EngineConfig(num_blocks=40, block_size=4, max_step_tokens=32, max_sequences=4, swap_blocks=swap_blocks)
    engine = fake_engine(config)
    batch = EngineRequest("batch", [1] * 12, greedy(40), latency_class=BATCH)
    whole: dict[Key, TokenOutput] = {}
    number, now = 0, 0.0
    engine.add(batch)
    while ("batch", 0) not in whole or whole["batch", 0].finish_reason is None:
        while sum(s.latency_class == REALTIME for s in engine.batcher.queue.waiting) < 3:
            engine.add(EngineRequest(f"now{number}", [number % 1000] * 9, greedy(20), latency_class=REALTIME))
            number += 1
        collect(engine.step(now), whole)
        engine.check_integrity()
        now += 0.1
    assert now < 60 + 4
    assert endings(whole)["batch", 0] == alone([batch])["batch", 0]
    assert 0 < whole["batch", 0].num_preemptions <= MAX_PREEMPTIONS
    drain(engine, whole)


def test_what_newcomers_were_promised_leaves_nobody_out_for_long() -> None:
    """Steps take 10 ms and 1 ms per token: with a realtime prompt in each, no batch token would ever fit in time."""
    seconds = [0.0]
    steps: list[Batch] = []

    def compute(batch: Batch) -> None:
        steps.append(batch)
        seconds[0] += 10e-3 + 1e-3 * batch.num_tokens

    engine = fake_engine(EngineConfig(num_blocks=400, block_size=4, max_sequences=16), before_execute=compute, clock=lambda: seconds[0])
    engine.add(EngineRequest("batch", [1] * 12, greedy(40), latency_class=BATCH))
    whole: dict[Key, TokenOutput] = {}
    while ("batch", 0) not in whole or whole["batch", 0].finish_reason is None:
        chat = EngineRequest(f"now{len(steps)}", [len(steps) % 1000] * 20, greedy(1), latency_class=REALTIME, ttft_target_seconds=0.2)
        engine.add(chat)
        collect(engine.step(seconds[0]), whole)
    held = [index for index, batch in enumerate(steps) if any(span.sequence.request_id == "batch" for span in batch.spans)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(held)]
    assert max(gaps) == MAX_SKIPS + 1
    assert gaps.count(MAX_SKIPS + 1) > 30, "and it was left out as long as it may be"


@pytest.mark.parametrize(
    "batch",
    [EngineRequest("batch", [1] * 3, greedy(30), latency_class=BATCH), EngineRequest("batch", [1] * 400, greedy(3), latency_class=BATCH)],
    ids=["decoding", "prompt"],
)
def test_long_urgent_prompts_leave_each_step_a_part(batch: EngineRequest) -> None:
    """Realtime prompts of thousands of tokens, and many short ones, want more than every step has."""
    engine = fake_engine(EngineConfig(num_blocks=9000, block_size=4, max_step_tokens=64, max_sequences=16, prefix_cache=False))
    engine.add(batch)
    whole: dict[Key, TokenOutput] = {}
    numbers = itertools.count()
    for step in range(150):
        while sum(s.latency_class == REALTIME for s in [*engine.batcher.queue.running, *engine.batcher.queue.waiting]) < 14:
            size = 1000 if step % 2 else 20
            engine.add(EngineRequest(f"now{next(numbers)}", [7] * size, greedy(2), latency_class=REALTIME))
        collect(engine.step(0.01 * step), whole)
        if ("batch", 0) in whole and whole["batch", 0].finish_reason:
            break
    assert whole["batch", 0].finish_reason, "4 of 64 tokens are its own in each step"


def test_nobody_gives_way_to_one_that_goes_after_them() -> None:
    """Seven blocks of four: realtime has grown to five, batch has two and wants a third for its last token."""
    engine = fake_engine(EngineConfig(num_blocks=7, block_size=4, max_step_tokens=64, max_sequences=4, prefix_cache=False))
    whole = run(
        engine,
        [
            EngineRequest("now", [1] * 15, greedy(12), latency_class=REALTIME),
            EngineRequest("batch", [2] * 7, greedy(3), latency_class=BATCH),
        ],
    )
    assert whole["now", 0].num_preemptions == 0
    assert whole["batch", 0].finish_reason


def test_as_many_slots_as_a_step_has_tokens_dont_keep_the_urgent_out() -> None:
    engine = fake_engine(EngineConfig(num_blocks=400, block_size=4, max_step_tokens=16, max_sequences=16))
    for index in range(16):
        engine.add(EngineRequest(f"batch{index}", [index] * 2, greedy(40), latency_class=BATCH))
    for _ in range(8):
        engine.step(0.0)
    engine.add(EngineRequest("now", [99] * 4, greedy(1), latency_class=REALTIME))
    outputs = [output for _ in range(3) for output in engine.step(0.0)]
    assert any(output.request_id == "now" and output.token_ids for output in outputs)


def test_a_class_below_its_floor_goes_first_whatever_waits() -> None:
    """One of 16 slots is batch's; nobody waits half a minute for it."""
    engine = fake_engine(EngineConfig(num_blocks=320, block_size=4, max_step_tokens=64, max_sequences=16))
    for index in range(40):
        engine.add(EngineRequest(f"now{index}", [index] * 4, greedy(30), latency_class=REALTIME))
    engine.add(EngineRequest("batch", [1] * 12, greedy(10), latency_class=BATCH))
    whole: dict[Key, TokenOutput] = {}
    for step in itertools.count():
        if not engine.has_work:
            break
        collect(engine.step(0.1 * step), whole)
    assert len(whole) == 41
    assert whole["batch", 0].start_time == 0.0, "with the first"
    assert sum(output.start_time == 0.0 for output in whole.values()) < 41, "and others had to wait"
    assert whole["batch", 0].num_preemptions == 0


def test_b24_two_that_come_back_together_dont_wait_for_each_other() -> None:
    """Seven blocks; one needs 5, the other 4, and the step brings back one at a time."""
    config = EngineConfig(num_blocks=7, block_size=4, max_step_tokens=32, swap_blocks=20, max_step_copies=1)
    engine = fake_engine(config)
    requests = [EngineRequest("a", [1] * 15, greedy(5), latency_class=BATCH), EngineRequest("b", [2] * 11, greedy(5), latency_class=BATCH)]
    whole: dict[Key, TokenOutput] = {}
    for request in requests:
        engine.add(request)
        collect(engine.step(0.0), whole)
        if engine.batcher.queue.running:
            engine.batcher.admission.preempt(engine.batcher.queue.running[-1], Cause.CAPACITY, 0.0)
    assert engine.stats().num_swaps == 2
    assert endings(drain(engine, whole, max_steps=40)) == alone(requests)


@pytest.mark.parametrize("after", range(14))
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_abort_in_any_state_leaves_no_slot_promised(after: int, prefix_cache: bool) -> None:
    config = EngineConfig(
        num_blocks=12, block_size=4, max_step_tokens=16, max_sequences=3, swap_blocks=20, max_step_copies=1, prefix_cache=prefix_cache
    )
    engine = fake_engine(config)
    for index in range(3):
        engine.add(EngineRequest(f"b{index}", [index, *range(8)], greedy(12), n=2, latency_class=BATCH))
    for _ in range(4):
        engine.step(0.0)
    engine.add(EngineRequest("now", [99] * 30, greedy(3), latency_class=REALTIME))
    for _ in range(after):
        engine.step(0.0)
    for index in (0, 2):
        engine.abort(f"b{index}")
        engine.check_integrity()
    drain(engine)


def test_what_became_suspect_while_it_was_away_is_computed_again() -> None:
    """Another request that shares its first blocks fails: nobody finds those any more."""
    engine = fake_engine(EngineConfig(num_blocks=40, block_size=4, max_step_tokens=64, swap_blocks=20))
    requests = [EngineRequest(name, [*SHARED, index], greedy(12), latency_class=BATCH) for index, name in enumerate(["victim", "bad"])]
    expected: dict[Key, Ending] = alone(requests)
    whole: dict[Key, TokenOutput] = {}
    for request in requests:
        engine.add(request)
        collect(engine.step(0.0), whole)
    queue = engine.batcher.queue
    engine.batcher.admission.preempt(queue.running[0], Cause.CLASS, 0.0)
    victim = queue.waiting[0]
    assert victim.swap is not None
    engine.batcher.tables.distrust(queue.running[0])
    assert endings(drain(engine, whole)) == expected
    assert engine.stats().num_computed_tokens > sum(len(request.prompt_token_ids) + 11 for request in requests) - 20
