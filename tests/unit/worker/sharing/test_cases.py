"""Cases of CASES.md about caches that are shared, swapped and given up: what others' systems got wrong, tried here."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine.admission import Cause
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import EngineRequest, TokenOutput
from services.worker.sharing.arena import Arena
from services.worker.sharing.device import SharedDevice
from services.worker.sharing.residency import Place
from services.worker.sharing.weights import Weights
from tests.clockwork import Clockwork
from tests.drafters import Guesser, always, often_right
from tests.engine_harness import Key, alone, collect, drain, endings, engine_on, greedy, run, tokens_of
from tests.fake_runner import fake_engine
from tests.tiny_models import VOCAB, load_native, save_model

REALTIME, BATCH = 1, 3
SMALL = EngineConfig(num_blocks=18, block_size=4, max_step_tokens=48, max_sequences=6)
FEATURES = ({}, {"prefix_cache": False}, {"swap_blocks": 0})


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_b17_an_eight_bit_cache_in_a_full_pool_splices_in_nothing_foreign(
    tmp_path: Path, kv_format: str, features: dict[str, object]
) -> None:
    """B17: 48 unique prompts on a pool that is always full, with each feature off in turn; REF is the same format, one by one."""
    save_model("qwen3", tmp_path)
    decoder, rng = load_native(tmp_path, "bf16"), random.Random(17)
    requests = [
        EngineRequest(f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randint(20, 60))], greedy(12), latency_class=1 + i % 3)
        for i in range(48)
    ]
    reference = engine_on(decoder, kv_format=kv_format, level="bf16", max_sequences=1, prefix_cache=False)
    expected = tokens_of(run(reference, requests))
    fields = {"swap_blocks": 8, "num_blocks": 12, "max_sequences": 6, **features}
    engine = engine_on(decoder, max_drafts=2, kv_format=kv_format, level="bf16", **fields)  # type: ignore[arg-type]
    for request in requests:
        engine.add(request)
    whole: dict[Key, TokenOutput] = {}
    full = steps = 0
    while engine.has_work:
        collect(engine.step(0.1 * steps), whole)
        full += engine.stats().num_free_blocks == 0
        steps += 1
    assert tokens_of(drain(engine, whole)) == expected
    if engine.config.prefix_cache:
        assert full > steps / 2, "the pool was never full: nothing is shown"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b21_what_was_swapped_for_a_request_goes_with_it(prefix_cache: bool) -> None:
    """B21: eight requests are swapped and then left, fifty times: host memory holds nothing of them, and every slot can be had again."""
    config = EngineConfig(num_blocks=40, block_size=4, max_step_tokens=64, max_sequences=8, swap_blocks=40, prefix_cache=prefix_cache)
    engine = fake_engine(config)
    for cycle in range(50):
        for index in range(8):
            engine.add(EngineRequest(f"b{index}", [cycle, index, *range(9)], greedy(20), latency_class=BATCH))
        for _ in range(3):
            engine.step(float(cycle))
        running = list(engine.batcher.queue.running)
        assert len(running) == 8
        for sequence in running:
            engine.batcher.admission.preempt(sequence, Cause.CLASS, float(cycle))
        engine._save()
        assert engine.batcher.tables.host.num_swapped >= 8
        assert engine.stats().num_held_host_blocks >= 8 * (not prefix_cache)
        for index in range(8):
            engine.abort(f"b{index}")
            engine.check_integrity()
        assert engine.batcher.tables.host.num_swapped == 0
        assert engine.stats().num_held_host_blocks == 0
        assert engine.stats().num_used_blocks == 0
    assert engine.stats().num_swaps == 400


@pytest.mark.parametrize("first", ["abort", "copies", "weights"])
def test_b22_news_of_what_was_left_ends_nothing(first: str) -> None:
    """B22: a request is left while blocks of it go out and come back and its weights arrive, whichever is heard of first.

    Copies are over when a step is, so no notice of them can be late. Weights come on a thread of their own.
    """
    arena = Arena(12)
    config = EngineConfig(num_blocks=12, block_size=4, max_step_tokens=16, max_sequences=3, swap_blocks=12, max_step_copies=1)
    engines = {model: fake_engine(config, model=model, pool=arena.open(model)) for model in ("a", "b")}
    decoders = {model: Clockwork() for model in engines}
    weights = Weights(4096, decoders)
    device = SharedDevice(engines, arena, engines, weights)
    for decoder in decoders.values():
        decoder.let_come.set()
    device.add(EngineRequest("left", list(range(18)), greedy(20), latency_class=BATCH, model="a"))
    for number in range(6):
        device.step(0.1 * number)
        weights.finish()
    (sequence,) = engines["a"].batcher.queue.running
    engines["a"].batcher.admission.preempt(sequence, Cause.CLASS, 1.0)  # copies out are pending
    decoders["b"].let_come.clear()
    device.add(EngineRequest("stays", list(range(50, 62)), greedy(4), latency_class=REALTIME, model="b"))

    def come() -> None:
        decoders["b"].let_come.set()
        weights.finish()

    act: dict[str, Callable[[], None]] = {
        "abort": lambda: device.abort("left"),
        "copies": lambda: engines["a"]._save(),
        "weights": come,
    }
    if first != "weights":
        act.pop(first)()
    whole: dict[Key, TokenOutput] = {}
    weights.advance({"b": REALTIME}, 20.0)
    assert weights.residency.residents["b"].place is Place.ARRIVING
    for name in ("weights", "copies", "abort") if first == "weights" else tuple(act):
        act[name]()
    for never in ("left", "left", "nobody's"):
        device.abort(never)
    now = 30.0
    while device.has_work:
        collect((output for output in device.step(now).outputs if isinstance(output, TokenOutput)), whole)
        weights.finish()
        now += 1.0
    request = EngineRequest("stays", list(range(50, 62)), greedy(4))
    reference = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_sequences=1, prefix_cache=False), model="b")
    assert endings(whole) == endings(run(reference, [request]))
    device.check_integrity()
    arena.check_integrity([])
    assert all(engine.batcher.tables.host.num_swapped == 0 for engine in engines.values())


def test_x02_an_org_that_fishes_for_anothers_secrets_gets_none() -> None:
    """X02: A's prompts hold secrets; B sends a thousand prompts that begin as they do, under preemption and aborts.

    What the stand-in says next is a hash of what it reads back, so that B's answers equal those of B alone only if nothing of A's was read.
    """
    rng = random.Random(2)
    config = replace(SMALL, swap_blocks=12, host_blocks=16, max_step_copies=4)
    engine = fake_engine(config, speculator=always(2, Guesser(often_right)))
    secrets = [[900 + rng.randrange(90) for _ in range(8)] for _ in range(20)]
    beginning = list(range(8))
    whole: dict[Key, TokenOutput] = {}
    fishing: list[EngineRequest] = []
    left: set[str] = set()
    now = 0.0
    for index in range(1000):
        secret = rng.choice(secrets)
        if index % 3 == 0:
            prompt = [*beginning, *secret, rng.randrange(90)]
            engine.add(EngineRequest(f"a{index}", prompt, greedy(rng.randint(1, 9)), latency_class=rng.randint(1, 3), cache_salt=b"a"))
        guess = [*beginning, *secret[: rng.randint(0, 8)], *(rng.randrange(90) for _ in range(rng.randint(1, 3)))]
        bait = EngineRequest(f"b{index}", guess, greedy(rng.randint(1, 6)), cache_salt=b"b")
        engine.add(bait)
        fishing.append(bait)
        for _ in range(rng.choice([0, 0, 1, 2])):
            collect(engine.step(now), whole)
            now += 0.1
        engine.check_integrity()
        if rng.random() < 0.1 and engine.batcher.queue.requests:
            gone = rng.choice(list(engine.batcher.queue.requests))
            engine.abort(gone)
            left.add(gone)
    drain(engine, whole)
    assert engine.stats().num_preemptions > 10
    told = {key: ending for key, ending in endings(whole).items() if key[0].startswith("b") and key[0] not in left}
    assert told == alone([bait for bait in fishing if bait.request_id not in left])
    asked: set[tuple[int, ...]] = set()  # B's are admitted in the order in which they come
    num_found = 0
    for bait in fishing:
        prompt_ids = tuple(bait.prompt_token_ids)
        if (output := whole.get((bait.request_id, 0))) is not None and output.num_cached_tokens:
            assert prompt_ids[: output.num_cached_tokens] in asked, "found without having been asked by B before"
            num_found += 1
        asked |= {prompt_ids[:length] for length in range(4, len(prompt_ids), 4)}
    assert num_found > 100


def test_b16_a_salt_that_is_a_models_name_finds_nothing_of_it() -> None:
    """B16: org "m" with model "" beside no org with model "m", and pairs that concatenate alike, on one pool."""
    arena = Arena(60)
    part = arena.open("m")
    config = EngineConfig(num_blocks=60, block_size=4)
    prompt = list(range(13))
    for index, (version, salt) in enumerate([("m", b""), ("", b"m"), ("ab", b"c"), ("a", b"bc"), ("abc", b""), ("", b"abc")]):
        engine = fake_engine(config, model=version, pool=part)
        output = run(engine, [EngineRequest(f"r{index}", prompt, greedy(2), cache_salt=salt)])[f"r{index}", 0]
        assert output.num_cached_tokens == 0, (version, salt)
