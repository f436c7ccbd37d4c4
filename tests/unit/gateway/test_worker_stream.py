"""Requests whose news comes by a subscription: the same as by their calls, and none keeps another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from forebay.v1 import worker_pb2
from services.gateway.client import MeshCall
from services.gateway.mesh import Mesh, MeshLimits
from tests.fakes import LENGTH, FakeScheduler, FakeWorker, Script, WorkerCall, play, serving
from tests.scheduler_harness import until
from tests.unit.gateway.build import generation

FAST = MeshLimits(worker_silence=20.0, scheduler_answer=20.0, replace_patience=10.0, exclusion=0.2, backoff=0.01)
LARGE = [7] * 40_000  # one byte each, and a bit


@asynccontextmanager
async def fleet(*scripts: Script, knows_subscriptions: bool = True) -> AsyncIterator[tuple[Mesh, list[FakeWorker]]]:
    """Workers whose subscriptions stand: a request that came before its subscription would go by its call."""
    workers = [FakeWorker(script, f"w{number}") for number, script in enumerate(scripts)]
    scheduler = FakeScheduler(workers)
    for worker in workers:
        worker.knows_subscriptions = knows_subscriptions
    async with serving(*workers, scheduler):
        mesh = Mesh([scheduler.address], FAST)
        try:
            for worker in workers if knows_subscriptions else ():
                await subscribed(mesh, worker)
            yield mesh, workers
        finally:
            await mesh.close()


async def subscribed(mesh: Mesh, worker: FakeWorker) -> None:
    """Waits until the subscription is there."""
    with mesh.worker(worker.address) as there:
        subscription = there._subscribed(0.0)
        assert subscription is not None
        await until(lambda: worker.subscriptions.of(worker_pb2.Delivery(subscription=subscription.name)) is not None)


async def tokens(mesh: Mesh, **fields: Any) -> list[int]:
    """A whole generation's, its positions checked to be gapless."""
    ids: list[int] = []
    async with MeshCall(mesh, generation(**fields)) as call, aclosing(call.events()) as events:
        async for event in events:
            if isinstance(event, worker_pb2.TokenDelta):
                assert event.first_position == len(ids)
                ids.extend(event.token_ids)
    assert call.finished
    return ids


async def test_requests_share_a_subscription() -> None:
    async with fleet(play([5, 6, 7])) as (mesh, (worker,)):
        assert await asyncio.gather(*(tokens(mesh) for _ in range(5))) == [[5, 6, 7]] * 5
        places = [call.request.delivery for call in worker.calls]
        assert len({place.subscription for place in places}) == 1
        assert len({place.stream for place in places}) == 5
        assert all(call.carried is not None for call in worker.calls)


async def test_a_worker_that_does_not_know_subscriptions_sends_by_the_call_and_is_not_asked_again() -> None:
    async with fleet(play([5, 6, 7]), knows_subscriptions=False) as (mesh, (worker,)):
        assert await tokens(mesh) == [5, 6, 7]
        assert await tokens(mesh) == [5, 6, 7]
        assert [call.carried for call in worker.calls] == [None, None]
        assert not worker.calls[1].request.HasField("delivery")


@pytest.mark.parametrize("code", [None, grpc.StatusCode.INTERNAL])
async def test_what_a_broken_subscription_carried_goes_on_elsewhere(code: grpc.StatusCode | None) -> None:
    go_on = asyncio.Event()

    async def breaks(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([5, 6])
        await call.carried.flush()
        await go_on.wait()
        workers[0].subscriptions.close()
        await asyncio.Event().wait()

    async with fleet(breaks, play([5, 6, 7, 8])) as (mesh, workers):
        workers[0].subscription_error = code
        running = [asyncio.create_task(tokens(mesh))]
        await workers[0].calls.until_length(1)
        go_on.set()
        assert await running[0] == [5, 6, 7, 8]
        assert list(workers[1].calls[0].request.delivered[0].ids) == [5, 6]
        await workers[0].cancelled.until_length(1)


async def test_a_slow_reader_is_paused_and_keeps_no_other() -> None:
    async def much(call: WorkerCall) -> None:
        await call.accept()
        for _ in range(30 if len(call.request.prompt_token_ids) == 1 else 1):
            await call.tokens(LARGE)
        await call.tokens([7], reason=LENGTH)
        await call.complete()

    async with fleet(much) as (mesh, (worker,)), MeshCall(mesh, generation(prompt=[1])) as call, aclosing(call.events()) as events:
        assert isinstance(await anext(events), worker_pb2.Accepted)
        await until(lambda: worker.calls[0].carried.paused)
        num_sent = worker.calls[0].num_sent[0]
        assert await tokens(mesh, prompt=[1, 2]) == [*LARGE, 7]
        assert num_sent <= worker.calls[0].num_sent[0] < 20 * len(LARGE)
        num_tokens = sum([len(event.token_ids) async for event in events if isinstance(event, worker_pb2.TokenDelta)])
        assert num_tokens == 30 * len(LARGE) + 1


async def test_a_subscription_ends_with_the_mesh() -> None:
    worker = FakeWorker(play([5]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], FAST)
        await subscribed(mesh, worker)
        assert await tokens(mesh) == [5]
        await mesh.close()
        assert worker.calls[0].carried is not None
        place = worker.calls[0].request.delivery
        await until(lambda: worker.subscriptions.of(place) is None)
