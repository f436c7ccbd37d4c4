"""The mesh client for vectors: failover asks for what is missing alone, nothing comes twice, and a lease always ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from forebay.v1 import types_pb2, worker_pb2
from services.common.errors import Code, StatusError
from services.gateway.embed_call import EmbedCall, EmbedEvent, numbers
from services.gateway.embed_request import Embedding
from services.gateway.mesh import Mesh, MeshLimits
from tests import fake_embedder
from tests.fake_embedder import DIMENSIONS, EmbedScript, FakeEmbedder, embed_all, embed_nothing, vector
from tests.fakes import FakeScheduler, serving
from tests.unit.gateway.build import FAST, make_model

INPUTS = [[1, 2], [3], [4, 5, 6]]
Worker = fake_embedder.EmbedCall


@asynccontextmanager
async def fleet(*scripts: EmbedScript, limits: MeshLimits = FAST) -> AsyncIterator[tuple[Mesh, FakeScheduler, list[FakeEmbedder]]]:
    workers = [FakeEmbedder(script, f"w{number}") for number, script in enumerate(scripts)]
    scheduler = FakeScheduler(workers)
    async with serving(*workers, scheduler):
        mesh = Mesh([scheduler.address], limits)
        try:
            yield mesh, scheduler, workers
        finally:
            await mesh.close()


def embedding(inputs: Sequence[list[int]] = INPUTS, deadline_seconds: float = 30.0) -> Embedding:
    return Embedding(
        request_id="ab" * 16,
        org="acme",
        latency_class=types_pb2.LATENCY_CLASS_STANDARD,
        model=make_model(template=None, compiler=None, dimensions=DIMENSIONS),
        inputs=list(inputs),
        dimensions=DIMENSIONS,
        label="",
        deadline_seconds=deadline_seconds,
    )


async def run(mesh: Mesh, request: Embedding) -> tuple[EmbedCall, list[EmbedEvent]]:
    async with EmbedCall(mesh, request) as call, aclosing(call.events()) as events:
        return call, [event async for event in events]


def check_whole(events: Sequence[EmbedEvent], inputs: Sequence[list[int]] = INPUTS) -> None:
    """Accepted once and first, then each input's vector once."""
    assert isinstance(events[0], worker_pb2.Accepted)
    vectors = [one for event in events[1:] if isinstance(event, list) for one in event]
    assert sorted(index for index, _ in vectors) == list(range(len(inputs)))
    assert all(list(numbers(values)) == vector(inputs[index]) for index, values in vectors)


async def die_behind_one(call: Worker) -> None:
    await call.accept()
    await call.vectors([1])
    await call.fail(Code.UNAVAILABLE)


async def test_another_worker_is_asked_for_what_is_missing_alone() -> None:
    async with fleet(die_behind_one, embed_all) as (mesh, scheduler, (first, second)):
        call, events = await run(mesh, embedding())
        (finish,) = await scheduler.finishes.until_length(1)
        assert mesh.excluded() == ["w0"]
    check_whole(events)
    assert (first.embed_calls[0].inputs, second.embed_calls[0].inputs) == (INPUTS, [[1, 2], [4, 5, 6]])
    assert scheduler.places[0].ticket == scheduler.places[1].ticket
    assert [place.lost_epoch for place in scheduler.places] == [0, 1]
    assert call.num_replacements == 1
    assert (finish.epoch, finish.usage) == (2, types_pb2.Usage(prompt_tokens=6))
    assert [attempt.lost for attempt in finish.explanation.attempts] == ["unreachable", ""]


@pytest.mark.parametrize("code", [Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION, Code.ABORTED, Code.NOT_FOUND])
async def test_a_worker_without_room_is_asked_no_more_but_not_avoided(code: Code) -> None:
    async def refuse(call: Worker) -> None:
        await call.fail(code)

    async with fleet(refuse, embed_all) as (mesh, _, _):
        _, events = await run(mesh, embedding())
        assert mesh.excluded() == []
    check_whole(events)


async def test_a_silent_worker_is_left() -> None:
    async with fleet(embed_nothing, embed_all, limits=replace(FAST, worker_silence=0.05)) as (mesh, _, (silent, _)):
        _, events = await run(mesh, embedding())
        await silent.cancelled.until_length(1)
    check_whole(events)


async def test_a_stream_that_ends_early_is_gone_on_with() -> None:
    async def stop_early(call: Worker) -> None:
        await call.accept()
        await call.vectors([2])

    async with fleet(stop_early, embed_all) as (mesh, _, _):
        _, events = await run(mesh, embedding())
    check_whole(events)


async def test_a_vector_that_comes_twice_is_passed_on_once() -> None:
    async def repeat(call: Worker) -> None:
        await call.accept()
        await call.vectors([0, 0, 1])
        await call.vectors([0, 2])
        await call.complete()

    async with fleet(repeat) as (mesh, _, _):
        _, events = await run(mesh, embedding())
    check_whole(events)


@pytest.mark.parametrize(("indexes", "num_bytes"), [([0], 4 * DIMENSIONS - 1), ([0], 0), ([3], 4 * DIMENSIONS), ([-1], 4 * DIMENSIONS)])
async def test_a_message_that_makes_no_sense_is_not_believed(indexes: list[int], num_bytes: int) -> None:
    async def lie(call: Worker) -> None:
        await call.accept()
        vectors = worker_pb2.Vectors(indexes=indexes, values=bytes(num_bytes))
        await call.context.write(worker_pb2.WorkerServiceEmbedResponse(vectors=vectors))
        await asyncio.Event().wait()

    async with fleet(lie, embed_all) as (mesh, _, _):
        _, events = await run(mesh, embedding())
    check_whole(events)


async def test_what_every_worker_loses_is_given_up() -> None:
    async with fleet(die_behind_one, limits=replace(FAST, max_attempts=2, exclusion=0.0)) as (mesh, scheduler, _):
        with pytest.raises(StatusError, match="lost its worker 2 times") as caught:
            await run(mesh, embedding([[1], [2], [3], [4]]))
        (finish,) = await scheduler.finishes.until_length(1)
    assert caught.value.code is Code.UNAVAILABLE
    assert finish.status_code == Code.UNAVAILABLE.value[0]
    assert finish.usage.prompt_tokens == 2  # of what came


async def test_a_bad_request_is_not_tried_elsewhere() -> None:
    async def refuse(call: Worker) -> None:
        await call.fail(Code.INVALID_ARGUMENT, "inputs[0] is empty")

    async with fleet(refuse, embed_all) as (mesh, _, (_, second)):
        with pytest.raises(StatusError, match="is empty"):
            await run(mesh, embedding())
        assert second.embed_calls == []


async def test_the_deadline_ends_it_on_the_worker() -> None:
    async with fleet(embed_nothing) as (mesh, scheduler, (worker,)):
        with pytest.raises(StatusError, match=r"deadline of 0\.2 s passed on the worker"):
            await run(mesh, embedding(deadline_seconds=0.2))
        (finish,) = await scheduler.finishes.until_length(1)
    assert finish.finish_reason == types_pb2.FINISH_REASON_DEADLINE
    assert len(worker.embed_calls) == 1
