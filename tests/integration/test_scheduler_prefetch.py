"""Models that requests wait for are brought to devices ahead: by one scheduler at a time, which writes A[m, g], once and not again."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from forebay.v1 import scheduler_pb2
from services.scheduler import affinity, keys
from services.scheduler.affinity import Affinity, Kept
from tests.scheduler_harness import (
    MODEL,
    FakeWorker,
    LedgerBench,
    RunningScheduler,
    fake_worker,
    lease_of,
    make_ticket,
    make_worker,
    running_scheduler,
    until,
    wire_ticket,
)

OTHER = "other@fp32"
PREFETCH = scheduler_pb2.MODEL_ACT_KIND_PREFETCH
HOST, DEVICE = scheduler_pb2.MODEL_PLACE_HOST, scheduler_pb2.MODEL_PLACE_DEVICE


async def test_one_leads_until_it_resigns(bench: LedgerBench) -> None:
    one, two = Affinity(bench.store, "s1"), Affinity(bench.store, "s2")
    assert await one.lead([MODEL]) is not None
    assert await one.lead([MODEL]) is not None, "it goes on"
    assert await two.lead([MODEL]) is None
    assert not await two.write({})
    await two.resign()
    assert await two.lead([MODEL]) is None, "it was not its to resign from"
    await one.resign()
    assert await two.lead([MODEL]) is not None


async def test_one_that_is_gone_is_followed(bench: LedgerBench, monkeypatch: Any) -> None:
    monkeypatch.setattr(affinity, "LEASE_SECONDS", 0.05)
    one, two = Affinity(bench.store, "s1"), Affinity(bench.store, "s2")
    assert await one.lead([]) is not None

    async def follows() -> bool:
        return await two.lead([]) is not None

    await until(follows)
    assert not await one.write({(MODEL, "w1"): Kept(is_on_device=True)})


async def test_the_matrix_is_read_as_it_was_written_with_the_rates_of_late(bench: LedgerBench) -> None:
    hand = Affinity(bench.store, "s1")
    led = await hand.lead([MODEL, OTHER])
    assert led is not None
    assert led.matrix == {}
    assert led.rates == {MODEL: 0.0, OTHER: 0.0}
    matrix = {(MODEL, "w1"): Kept(is_on_device=True), (OTHER, "w1"): Kept(is_on_device=False, asked_at=led.now)}
    assert await hand.write(matrix)
    await bench.place(make_ticket(num_prompt_tokens=900, max_tokens=100), make_worker())
    led = await hand.lead([MODEL, OTHER])
    assert led is not None
    assert led.matrix == matrix
    assert 50 < led.rates[MODEL] <= 100, "1,000 tokens, in ten seconds' memory"
    await hand.write({(MODEL, "w2"): Kept(is_on_device=True)})
    led = await hand.lead([])
    assert led is not None
    assert list(led.matrix) == [(MODEL, "w2")], "what is gone has no entry"


def two_models(worker: FakeWorker, place: Any = HOST) -> None:
    """It serves another model, too, and has weights of one on its device."""
    worker.register.models.add(model=OTHER, version="v1", block_size=16, num_blocks=64, loaded=True, max_model_len=1024)
    worker.state.budget.weights_bytes = 3
    worker.state.models.add(model=MODEL, place=DEVICE, num_bytes=2, num_requests=1)
    worker.state.models.add(model=OTHER, place=place, num_bytes=1, load_seconds=0.1)


async def _entry(scheduler: RunningScheduler, model: str) -> dict[str, Any]:
    (text,) = await scheduler.store.commands(["HGET", keys.AFFINITY, json.dumps([model, "w1"])])
    return json.loads(text) if text else {}


async def _waits(scheduler: RunningScheduler) -> Any:
    """A call for the other model, which has no room on any worker."""
    call = scheduler.place(wire_ticket(model=OTHER))
    await until(lambda: any(model == OTHER for model, _ in scheduler.scheduler.keeper.lines()))
    return call


@asynccontextmanager
async def full_worker(*schedulers: RunningScheduler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(slots=1)
    two_models(worker)
    worker.register.max_waiting = 0
    await worker.attach(*schedulers)
    worker.accept(await lease_of(schedulers[0].place(wire_ticket())))
    try:
        yield worker
    finally:
        await worker.detach()


async def test_what_waits_and_is_on_no_device_is_brought_once_by_one_of_two_schedulers(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url, "s1", prefetch=False) as one,
        running_scheduler(redis_server.url, "s2", prefetch=False) as two,
        full_worker(one, two) as worker,
    ):
        waiting = await _waits(one)
        for _ in range(2):
            for scheduler in (one, two):
                await scheduler.scheduler.placer.place()
        await until(lambda: worker.model_acts == [(PREFETCH, OTHER)])
        entry = await _entry(one, OTHER)
        assert (await _entry(one, MODEL)) == {"is_on_device": True, "asked_at": 0.0}
        assert entry["asked_at"] > 0
        assert one.scheduler.metrics.registry.get_sample_value("forebay_prefetches_total", {"model": OTHER}) == 1
        await one.scheduler.affinity.resign()
        await two.scheduler.placer.place()
        assert await _entry(one, OTHER) == entry, "who follows knows that it was asked for"
        assert worker.model_acts == [(PREFETCH, OTHER)]
        waiting.cancel()


async def test_nothing_is_brought_that_is_not_waited_for_or_has_no_room(redis_server) -> None:
    async with running_scheduler(redis_server.url, prefetch=False) as scheduler, full_worker(scheduler) as worker:
        placer = scheduler.scheduler.placer
        assert not (await placer.place()).prefetches
        waiting = await _waits(scheduler)
        worker.state.budget.weights_bytes = 2
        await until(lambda: scheduler.scheduler.registry.states(time.monotonic())[0].heartbeat.budget.weights_bytes == 2)
        assert not (await placer.place()).prefetches
        waiting.cancel()


async def test_it_is_done_without_being_asked(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler, full_worker(scheduler) as worker:
        waiting = await _waits(scheduler)
        await until(lambda: worker.model_acts == [(PREFETCH, OTHER)])
        await until(lambda: "w1" in scheduler.scheduler.placer.loads)
        waiting.cancel()


async def test_it_can_be_switched_off(redis_server) -> None:
    async with running_scheduler(redis_server.url, prefetch=False) as scheduler, fake_worker(scheduler):
        await until(lambda: bool(scheduler.scheduler.keeper.survey.serving))
        (holder,) = await scheduler.store.commands(["EXISTS", keys.PLACER])
        assert not holder


async def test_a_scheduler_that_stops_lets_the_other_lead_at_once(redis_server) -> None:
    async with running_scheduler(redis_server.url, "s2", prefetch=False) as two:
        async with running_scheduler(redis_server.url, "s1") as one:
            assert await one.scheduler.affinity.lead([]) is not None
            assert await two.scheduler.affinity.lead([]) is None
        assert await two.scheduler.affinity.lead([]) is not None
