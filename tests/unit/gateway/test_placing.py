"""Getting a lease: which refusals are waited out, which make way for the next scheduler, and what the client may read."""

import asyncio
from dataclasses import replace

import pytest

from services.common.errors import Code, StatusError, unavailable
from services.gateway import full_queues
from services.gateway.mesh import Mesh, MeshLimits
from services.gateway.placing import Deadline, Placement
from tests.fakes import FakeScheduler, FakeWorker, play, serving
from tests.unit.gateway.build import generation

PATIENT = MeshLimits(scheduler_answer=20.0, place_patience=20.0, backoff=0.01)


def placement(mesh: Mesh) -> Placement:
    return Placement(mesh, generation(), Deadline(30.0, mesh.clock))


def store_away(retry_after_seconds: float) -> StatusError:
    return unavailable("the queue's store is away: try again soon", retry_after_seconds, "STORE_UNAVAILABLE")


async def test_a_stall_of_redis_is_waited_out() -> None:
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        scheduler.refusals.extend(store_away(0.01) for _ in range(3))
        assert (await placement(mesh).lease(0)).epoch == 1
        assert len(scheduler.places) == 4
        await mesh.close()


async def test_tickets_say_where_their_gateway_is() -> None:
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], PATIENT, region="eu")
        await placement(mesh).lease(0)
        assert [place.ticket.region for place in scheduler.places] == ["eu"]
        await mesh.close()


async def test_an_outage_of_redis_is_not_waited_out() -> None:
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], MeshLimits(scheduler_answer=20.0, place_patience=0.5))
        scheduler.refusals.append(store_away(1.0))
        with pytest.raises(StatusError) as failure:
            await placement(mesh).lease(0)
        assert (failure.value.reason, failure.value.retry_after_seconds) == ("STORE_UNAVAILABLE", 1.0)
        assert len(scheduler.places) == 1
        await mesh.close()


async def test_a_scheduler_without_redis_makes_way_for_one_that_has_it() -> None:
    worker = FakeWorker(play([1]))
    cut_off, whole = FakeScheduler([worker]), FakeScheduler([worker])
    async with serving(worker, cut_off, whole):
        mesh = Mesh([cut_off.address, whole.address], PATIENT)
        cut_off.refusals.extend(store_away(1.0) for _ in range(2))
        for _ in range(4):
            assert (await placement(mesh).lease(0)).epoch == 1
        assert len(cut_off.places) <= 1, "others are asked first for a while"
        assert len(whole.places) == 4
        await mesh.close()


async def test_a_call_that_a_stopping_scheduler_cancels_goes_to_another() -> None:
    worker = FakeWorker(play([1]))
    stopping, whole = FakeScheduler([worker]), FakeScheduler([worker])
    async with serving(worker, stopping, whole):
        mesh = Mesh([stopping.address, whole.address], PATIENT)
        stopping.refusals.extend(StatusError(Code.CANCELLED, "CANCELLED") for _ in range(2))
        for _ in range(3):
            assert (await placement(mesh).lease(0)).epoch == 1
        await mesh.close()


async def test_a_full_queue_is_the_mesh_s_answer_whoever_gives_it() -> None:
    first, second = FakeScheduler([]), FakeScheduler([])
    async with serving(first, second):
        mesh = Mesh([first.address, second.address], PATIENT)
        for scheduler in (first, second):
            scheduler.refusals.append(unavailable("the queue is full: try again", 30.0, reason="QUEUE_FULL"))
        with pytest.raises(StatusError) as failure:
            await placement(mesh).lease(0)
        assert failure.value.reason == "QUEUE_FULL"
        assert len(first.places) + len(second.places) == 1
        await mesh.close()


async def test_a_full_queue_is_not_waited_out_however_soon_there_may_be_room() -> None:
    """Case F25."""
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        scheduler.refusals.append(unavailable("full", 0.01, reason="QUEUE_FULL"))
        with pytest.raises(StatusError, match="full"):
            await placement(mesh).lease(0)
        assert len(scheduler.places) == 1
        await mesh.close()


async def test_a_flood_asks_a_full_queue_by_a_few_calls_at_a_time() -> None:
    """Case F24 and F25: what those are told is told to all others at once, and ends when one of them has a place."""
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        scheduler.refusals.append(unavailable("full", 9.0, reason="QUEUE_FULL"))
        with pytest.raises(StatusError):
            await placement(mesh).lease(0)
        scheduler.hold.clear()
        probes = [asyncio.create_task(placement(mesh).lease(0)) for _ in range(full_queues.PROBES)]
        await scheduler.places.until_length(1 + len(probes))
        for _ in range(20):
            with pytest.raises(StatusError) as refusal:
                await placement(mesh).lease(0)
            assert (refusal.value.code, refusal.value.reason) == (Code.UNAVAILABLE, "QUEUE_FULL")
            assert 7 < (refusal.value.retry_after_seconds or 0) < 11
        assert len(scheduler.places) == 1 + len(probes)
        scheduler.hold.set()
        await asyncio.gather(*probes)
        assert (await placement(mesh).lease(0)).epoch == 1
        await mesh.close()


async def test_the_class_is_the_lease_s_and_stays_so() -> None:
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    scheduler.terms["latency_class"] = 3
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        place = placement(mesh)
        for _ in range(2):
            await place.lease(0)
        assert [asked.ticket.latency_class for asked in scheduler.places] == [2, 3]
        await mesh.close()


@pytest.mark.parametrize(("reason", "code", "seen"), [("MODEL_NOT_ALLOWED", Code.NOT_FOUND, "MODEL_NOT_FOUND")])
async def test_a_policy_that_has_changed_since_admission_is_seen_as_it_will_be(reason: str, code: Code, seen: str) -> None:
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        scheduler.refusals.append(StatusError(Code.PERMISSION_DENIED, "acme may not", reason=reason))
        with pytest.raises(StatusError) as failure:
            await placement(mesh).lease(0)
        assert (failure.value.code, failure.value.reason) == (code, seen)
        assert len(scheduler.places) == 1
        await mesh.close()


async def test_nobody_there_is_said_without_an_address() -> None:
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
    with pytest.raises(StatusError) as failure:
        await placement(mesh).lease(0)
    assert (failure.value.code, failure.value.message) == (Code.UNAVAILABLE, "no scheduler answers: try again")
    with pytest.raises(StatusError, match=r"^no scheduler answers: try again$"):
        await mesh.fleet()
    await mesh.close()


async def test_epochs_that_may_be_held() -> None:
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        place = placement(mesh)
        assert place.epochs == []
        await place.lease(0)
        assert place.epochs == [1]
        scheduler.gate.clear()
        task = asyncio.create_task(place.lease(0))
        await scheduler.places.until_length(2)
        task.cancel()
        await asyncio.wait([task])
        assert place.epochs == [1, 2], "the second lease may be on its way to nobody"
        await mesh.close()


async def test_a_model_that_no_worker_has_shown_is_said_so_before_anything_is_placed() -> None:
    """Its level, which is part of what workers are asked for, isn't known yet."""
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], PATIENT)
        request = generation()
        unknown = replace(request, model=replace(request.model, level=""))
        with pytest.raises(StatusError, match="no worker has loaded tiny yet") as refusal:
            await Placement(mesh, unknown, Deadline(30.0, mesh.clock)).lease(0)
        assert (refusal.value.code, refusal.value.retry_after_seconds) == (Code.UNAVAILABLE, 1.0)
        assert scheduler.places == []
        await mesh.close()
