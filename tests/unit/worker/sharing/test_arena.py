"""Models on one pool of pages: floors, ceilings, eviction by age, and nobody ever reads what another has written."""

import random
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.engine.block_pool import CacheIdentity, block_key
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineRequest, TokenOutput
from services.worker.sharing import claims
from services.worker.sharing.arena import Arena
from tests.engine_harness import REFERENCE, Ending, Key, cached_tokens, collect, endings, greedy, run, some_requests
from tests.fake_runner import FakePages, fake_engine

MODELS = {"a": 4, "b": 6, "c": 2}  # tokens of a block
PAGE_SLOTS = 6
SIZES = {"max_sequences": 5, "max_step_tokens": 24, "max_step_copies": 3}


class Device:
    """Engines of several models on one arena, stepped in any order, each step behind a settlement of claims. Four steps take a second."""

    def __init__(self, num_pages: int, floors: Sequence[int] = (0, 0, 0), **fields: object) -> None:
        self.pages = FakePages(num_pages, PAGE_SLOTS)
        swaps = bool(fields.get("swap_blocks") or fields.get("host_blocks"))
        # What is evicted to the host is copied behind the handover, so pages can't be cleared then.
        self.arena = Arena(num_pages, on_handover=None if swaps else self.pages.clear)
        parts = {model: self.arena.open(model, floor=floor) for model, floor in zip(MODELS, floors, strict=True)}
        self.engines = {
            model: fake_engine(
                EngineConfig(**{**SIZES, **fields, "num_blocks": parts[model].num_blocks, "block_size": size}),  # type: ignore[arg-type]
                model=model,
                pool=parts[model],
                pages=self.pages,
                number=number,
            )
            for number, (model, size) in enumerate(MODELS.items(), 1)
        }
        self.now = 0.0

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self.engines.values())

    def step(self, model: str) -> list[TokenOutput]:
        """One of `model`."""
        claims.settle(self.arena, self.engines, self.now)
        self.now += 0.25
        outputs = self.engines[model].step(self.now)
        self.check_integrity()
        return outputs

    def check_integrity(self) -> None:
        for engine in self.engines.values():
            engine.check_integrity()
        queues = [engine.batcher.queue for engine in self.engines.values()]
        self.arena.check_integrity([sequence.block_table for queue in queues for sequence in queue.running])

    def drain(self, into: dict[str, dict[Key, TokenOutput]], rng: random.Random) -> None:
        """Steps whoever has work, in any order, until nobody has."""
        for _ in range(5000):
            working = [model for model, engine in self.engines.items() if engine.has_work]
            if not working:
                break
            model = rng.choice(working)
            collect(self.step(model), into[model])
        assert not self.has_work, "it never ends"
        assert self.arena.pages.num_used == 0


def alone(model: str, requests: Sequence[EngineRequest]) -> dict[Key, Ending]:
    """What the model says to each in an engine and a memory of its own, one after another."""
    config = replace(REFERENCE, block_size=MODELS[model])
    return {key: ending for request in requests for key, ending in endings(run(fake_engine(config, model=model), [request])).items()}


@settings(max_examples=150, deadline=None)
@given(
    requests=st.tuples(some_requests(5), some_requests(5), some_requests(5)),
    floors=st.sampled_from([(0, 0, 0), (10, 0, 0), (4, 5, 12)]),
    host=st.sampled_from([{}, {"swap_blocks": 9}, {"swap_blocks": 60, "host_blocks": 20}, {"host_blocks": 20}]),
    seed=st.integers(0, 1 << 20),
)
def test_x02_ids_equal_each_model_alone_and_no_page_of_another_is_read(
    requests: tuple[list[EngineRequest], ...], floors: tuple[int, int, int], host: dict[str, object], seed: int
) -> None:
    """Requests come and are left at random, models step in any order; what a page held before is never read, or the runner raises."""
    device, rng = Device(36, floors, **host), random.Random(seed)
    coming = {model: list(of_model) for model, of_model in zip(MODELS, requests, strict=True)}
    whole: dict[str, dict[Key, TokenOutput]] = {model: {} for model in MODELS}
    left: set[tuple[str, str]] = set()
    while any(coming.values()):
        model = rng.choice(list(MODELS))
        engine = device.engines[model]
        if coming[model] and rng.random() < 0.5:
            engine.add(coming[model].pop())
        elif engine.has_work:
            collect(device.step(model), whole[model])
        if rng.random() < 0.05 and engine.batcher.queue.requests:
            request_id = rng.choice(list(engine.batcher.queue.requests))
            engine.abort(request_id)
            left.add((model, request_id))
            device.check_integrity()
    device.drain(whole, rng)
    for model, of_model in zip(MODELS, requests, strict=True):
        told = {key: ending for key, ending in endings(whole[model]).items() if (model, key[0]) not in left}
        assert told == alone(model, [request for request in of_model if (model, request.request_id) not in left])
        assert device.engines[model].batcher.tables.host.num_swapped == 0


class ArenaMachine(RuleBasedStateMachine):
    """Tables of imaginary sequences of three models over few contents, so that keys and pages meet often."""

    @initialize(num_pages=st.integers(6, 20), floors=st.tuples(*[st.integers(0, 2)] * 3), keep_cached=st.booleans())
    def build(self, num_pages: int, floors: tuple[int, int, int], keep_cached: bool) -> None:
        self.arena = Arena(num_pages, keep_cached=keep_cached)
        self.parts = {model: self.arena.open(model, floor=floor) for model, floor in zip("abc", floors, strict=True)}
        self.tables: dict[str, list[list[int]]] = {model: [] for model in self.parts}
        self.contents: dict[int, tuple[str, bytes]] = {}

    @rule(model=st.sampled_from("abc"), count=st.integers(0, 6))
    def allocate(self, model: str, count: int) -> None:
        part = self.parts[model]
        if count > part.num_available:
            with pytest.raises(AssertionError, match="available"):
                part.allocate(count)
            return
        before = part.num_available
        pages = part.allocate(count)
        assert part.num_available == before - count
        for page in pages:
            self.contents.pop(page, None)
        self.tables[model].append(pages)

    @rule(model=st.sampled_from("abc"), content=st.integers(0, 4), data=st.data())
    def fill(self, model: str, content: int, data: st.DataObject) -> None:
        pages = sorted({page for table in self.tables[model] for page in table} - self.contents.keys())
        if not pages:
            return
        page, key = data.draw(st.sampled_from(pages)), block_key(b"", [content])
        self.parts[model].register(page, key)
        if self.parts[model].find(key) == page:
            self.contents[page] = model, key

    @rule(model=st.sampled_from("abc"), contents=st.lists(st.integers(0, 4), max_size=3, unique=True))
    def share(self, model: str, contents: list[int]) -> None:
        keys = [block_key(b"", [content]) for content in contents]
        part = self.parts[model]
        found = part.lookup(keys)
        assert [self.contents[page] for page in found] == [(model, key) for key in keys[: len(found)]], "another's, or other content"
        before, taken = part.num_available, part.num_unreferenced(found)
        part.touch(found)
        assert part.num_available == before - taken
        self.tables[model].append(found)

    @precondition(lambda self: any(self.tables.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([model for model, tables in self.tables.items() if tables]))
        tables = self.tables[model]
        self.parts[model].free(tables.pop(data.draw(st.integers(0, len(tables) - 1))))

    @precondition(lambda self: any(self.tables.values()))
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([model for model, tables in self.tables.items() if tables]))
        table = data.draw(st.sampled_from(self.tables[model]))
        self.parts[model].forget(table)
        for page in table:
            self.contents.pop(page, None)

    @rule(model=st.sampled_from("abc"))
    def come_again(self, model: str) -> None:
        """The model goes and another of its name comes: it finds nothing."""
        if any(self.tables[model]):
            return
        floor, ceiling = self.parts[model].floor, self.parts[model].num_blocks
        self.arena.close(model)
        self.parts[model] = self.arena.open(model, floor=floor, ceiling=ceiling)
        self.contents = {page: content for page, content in self.contents.items() if content[0] != model}
        assert self.parts[model].num_cached == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "arena"):
            return
        for model, part in self.parts.items():
            part.check_integrity(self.tables[model])
            assert part.num_used <= part.num_blocks
            assert part.num_available >= min(part.num_owed, part.num_blocks - part.num_used), "a floor can't be had"
        self.arena.check_integrity([table for tables in self.tables.values() for table in tables])


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_floor_is_kept_free_and_a_ceiling_is_the_most() -> None:
    arena = Arena(10)
    a, b = arena.open("a", floor=3), arena.open("b", ceiling=4)
    assert (a.num_available, b.num_available) == (10, 4)
    pages = a.allocate(8)
    assert b.num_available == 2
    a.free(pages)
    b.allocate(4)
    assert (a.num_available, b.num_available) == (6, 0)


@pytest.mark.parametrize(("floor", "ceiling"), [(8, None), (5, 4), (0, 8), (-1, None)])
def test_what_can_never_be_had_is_refused_with_its_numbers(floor: int, ceiling: int | None) -> None:
    arena = Arena(10)
    arena.open("a", floor=3)
    with pytest.raises(ValueError, match=r"b: a floor of .* the other models' floors leave 7 of 10: lower them"):
        arena.open("b", floor=floor, ceiling=ceiling)


def test_the_oldest_cached_page_goes_first_whosever_it_is() -> None:
    arena = Arena(4)
    parts = {model: arena.open(model) for model in "ab"}
    for index, model in enumerate(["a", "b", "a", "b"]):
        (page,) = parts[model].allocate(1)
        parts[model].register(page, b"%d" % index)
        parts[model].free([page])
    evicted: list[tuple[str, bytes]] = []
    for model, part in parts.items():
        part.on_evict = lambda page, key, model=model: evicted.append((model, key))  # type: ignore[misc]
    parts["b"].allocate(3)
    assert evicted == [("a", b"0"), ("b", b"1"), ("a", b"2")]
    assert (parts["a"].num_cached, parts["b"].num_cached, parts["b"].num_used) == (0, 1, 3)


def test_b13_a_key_of_another_model_finds_nothing_even_if_it_is_the_same() -> None:
    arena = Arena(4)
    a, b = arena.open("a"), arena.open("b")
    (page,) = a.allocate(1)
    a.register(page, b"key")
    assert a.lookup([b"key"]) == [page]
    assert b.lookup([b"key"]) == []
    assert b.find(b"key") is None


def test_b13_b14_b16_models_versions_and_levels_share_no_prefix() -> None:
    """The same prompt to two models of one pool, to other weights under the same name, and to another level."""
    prompt = list(range(12))
    device = Device(36)
    for model in MODELS:
        assert cached_tokens(device.engines[model], EngineRequest("first", prompt, greedy(1))) == 0
        assert cached_tokens(device.engines[model], EngineRequest("again", prompt, greedy(1))) > 0
    arena = Arena(36)
    part = arena.open("m")
    seen = set()
    for version, level in [("v1", "bf16"), ("v2", "bf16"), ("v1", "int8"), ("v1@bf16", "bf16")]:
        config = EngineConfig(num_blocks=36, block_size=4, level=level, kv_format="bf16")
        engine = fake_engine(config, model=version, pool=part)
        assert cached_tokens(engine, EngineRequest("first", prompt, greedy(1))) == 0
        seen.add(engine.batcher.tables.open(EngineRequest("r", prompt, greedy(1))).root_key)
    assert len(seen) == 4
    assert CacheIdentity(b"", "v1@int8", "bf16").root_key() in seen


def test_b14_weights_that_come_under_an_old_name_find_nothing() -> None:
    arena = Arena(36)
    prompt = list(range(12))
    config = EngineConfig(num_blocks=36, block_size=4)
    old = fake_engine(config, model="v1", pool=arena.open("m"))
    run(old, [EngineRequest("warm", prompt, greedy(4))])
    arena.close("m")
    new = fake_engine(config, model="v2", pool=arena.open("m"))
    expected = run(fake_engine(config, model="v2"), [EngineRequest("warm", prompt, greedy(4))])["warm", 0].token_ids
    for index in range(12):
        output = run(new, [EngineRequest(f"r{index}", prompt, greedy(4))])[f"r{index}", 0]
        assert output.token_ids == expected
        assert index or output.num_cached_tokens == 0


# --- claims


def hog(device: Device, model: str, count: int, latency_class: int, max_tokens: int = 40) -> None:
    """So many requests of five pages or more."""
    for index in range(count):
        prompt = [index] * (4 * MODELS[model] + 1)
        device.engines[model].add(EngineRequest(f"hog {index}", prompt, greedy(max_tokens), latency_class=latency_class))


def fill(device: Device, model: str, latency_class: int, max_tokens: int = 40) -> None:
    """The model holds so much that the next one of its kind finds no room."""
    hog(device, model, 5, latency_class, max_tokens)
    for _ in range(50):
        device.step(model)
        if device.engines[model].want(device.now):
            return
    raise AssertionError("there is room for all")


def steps_until_first_token(device: Device, model: str, max_steps: int = 400) -> int:
    for number in range(1, max_steps):
        for name, engine in device.engines.items():
            if engine.has_work:
                outputs = device.step(name)
                if name == model and any(output.token_ids for output in outputs):
                    return number
    raise AssertionError("no token came")


@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_a_more_urgent_class_of_another_model_gets_its_pages_at_once(swap_blocks: int) -> None:
    device = Device(24, swap_blocks=swap_blocks)
    fill(device, "a", latency_class=3)
    device.engines["b"].add(EngineRequest("urgent", [1] * 40, greedy(2), latency_class=1))
    assert steps_until_first_token(device, "b") <= 3
    assert device.engines["a"].stats().num_class_preemptions > 0
    whole: dict[str, dict[Key, TokenOutput]] = {model: {} for model in MODELS}
    device.drain(whole, random.Random(0))


def test_a_lower_class_of_another_model_takes_nothing() -> None:
    device = Device(24)
    fill(device, "a", latency_class=1)
    device.engines["b"].add(EngineRequest("batch", [1] * 40, greedy(2), latency_class=3))
    assert not device.step("b")
    assert device.engines["b"].want(device.now)
    assert device.engines["a"].stats().num_preemptions == 0


def test_a_sequence_that_grows_takes_pages_of_lower_classes_of_others_not_its_own() -> None:
    """A realtime request of one model doesn't start over for another's batch."""
    device = Device(24)
    device.engines["b"].add(EngineRequest("urgent", [1] * 10, greedy(60), latency_class=1))
    device.step("b")
    fill(device, "a", latency_class=3)
    while device.engines["b"].has_work:
        device.step("b")
        if device.engines["a"].has_work:
            device.step("a")
    assert device.engines["b"].stats().num_preemptions == 0
    assert device.engines["a"].stats().num_class_preemptions > 0


def test_nobody_gives_way_in_vain() -> None:
    """All that the others could give would still be too little, so they keep it."""
    device = Device(24)
    hog(device, "a", 2, latency_class=3)
    hog(device, "c", 1, latency_class=1, max_tokens=8)
    for _ in range(4):
        device.step("a")
        device.step("c")
    held = device.arena.models["a"].num_used
    device.engines["b"].add(EngineRequest("large", [1] * 120, greedy(2), latency_class=1))
    claims.settle(device.arena, device.engines, device.now)
    assert device.arena.models["a"].num_used == held > 0
    assert device.arena.models["b"].num_claimed == 20


@pytest.mark.parametrize(("num_tokens", "max_steps"), [(60, 12), (100, 40)])  # of its fair share, or beyond that
def test_newcomers_leave_the_pages_that_come_free_to_whoever_claims_them(num_tokens: int, max_steps: int) -> None:
    """One model has a request for each that ends; another's large one gets in all the same."""
    device = Device(24)
    hog(device, "a", 200, latency_class=2, max_tokens=4)
    for _ in range(6):
        device.step("a")
    device.engines["b"].add(EngineRequest("large", [1] * num_tokens, greedy(2), latency_class=2))
    assert steps_until_first_token(device, "b") < max_steps
    assert device.engines["a"].batcher.queue.waiting


def test_below_its_fair_share_a_model_gets_pages_from_those_above_theirs() -> None:
    """Long requests of the same class hold all; they would for hundreds of steps."""
    device = Device(24, swap_blocks=64)
    hog(device, "c", 1, latency_class=2)
    device.step("c")
    fill(device, "a", latency_class=2)
    assert device.arena.models["a"].num_used > 10
    device.engines["b"].add(EngineRequest("small", [1] * 30, greedy(1), latency_class=2))
    assert steps_until_first_token(device, "b") <= 6  # the patience of two seconds comes to three
    assert device.engines["a"].stats().num_capacity_preemptions > 0
    assert device.engines["c"].stats().num_preemptions == 0


def test_evicted_by_another_model_a_page_is_on_the_host_before_it_is_written() -> None:
    device = Device(12, host_blocks=12)
    prompt = list(range(24))
    assert cached_tokens(device.engines["a"], EngineRequest("warm", prompt, greedy(1))) == 0
    run_here(device.engines["c"], EngineRequest("all", [9] * 23, greedy(1)))
    assert device.arena.models["a"].num_cached == 0
    assert device.engines["a"].stats().num_copied_out_blocks == 6
    engine: Engine = device.engines["a"]
    expected = alone("a", [EngineRequest("again", prompt, greedy(6))])
    assert endings(run_here(engine, EngineRequest("again", prompt, greedy(6)))) == expected
    assert engine.stats().num_copied_in_blocks == 5


def run_here(engine: Engine, request: EngineRequest) -> dict[Key, TokenOutput]:
    """Like engine_harness.run, whose last look is at a pool of the engine's own."""
    whole: dict[Key, TokenOutput] = {}
    engine.add(request)
    while engine.has_work:
        collect(engine.step(0.0), whole)
    return whole
