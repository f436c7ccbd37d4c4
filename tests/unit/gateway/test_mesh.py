"""Channels under mutual TLS: made anew when the certificate has changed, without harm to the calls that are open."""

import asyncio
from pathlib import Path

import pytest

from forebay.v1 import scheduler_pb2, worker_pb2
from services.cli import authority
from services.common.errors import StatusError
from services.common.tls import Identity, role_name
from services.gateway.mesh import Mesh, MeshLimits
from tests.fakes import FakeScheduler, FakeWorker, play
from tests.scheduler_harness import until
from tests.unit.common.test_pem import files_of
from tests.unit.common.test_tls import Clock

PLACE = scheduler_pb2.PlaceRequest(ticket=scheduler_pb2.Ticket(request_id="r", model="tiny@fp32"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.make(tmp_path / "certs")
    return tmp_path / "certs"


def identity(folder: Path, role: str, clock: Clock | None = None) -> Identity:
    return Identity(files_of(folder, role), role_name(role), clock=clock or Clock())


async def generate(mesh: Mesh, worker: FakeWorker) -> int:
    """The number of messages of one Generate call."""
    with mesh.worker(worker.address) as there:
        return len([message async for message in there.stub.Generate(worker_pb2.WorkerServiceGenerateRequest(request_id="r"), timeout=10)])


async def test_a_new_ca_is_taken_up_and_open_calls_go_on(folder: Path) -> None:
    clock = Clock()
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    worker.identity, scheduler.identity = identity(folder, "worker", clock), identity(folder, "scheduler", clock)
    for server in (worker, scheduler):
        await server.start()
    mesh = Mesh([scheduler.address], clock=clock, identity=identity(folder, "gateway", clock))
    await mesh.fleet()
    expected = await generate(mesh, worker)
    scheduler.gate.clear()
    queued = mesh.in_turn()[0].stub.Place(PLACE)
    await queued.read()

    authority.make(folder, force=True)
    clock.now = 1.0
    await mesh.fleet()  # by a new connection, for the old one is closing
    assert mesh.worker_addresses == []
    assert await generate(mesh, worker) == expected
    scheduler.gate.set()
    assert (await queued.read()).placed.address == worker.address
    await mesh.close()
    for server in (worker, scheduler):
        await server.stop()


async def test_a_gateway_without_tls_gets_nothing_from_a_mesh_with_it(folder: Path) -> None:
    scheduler = FakeScheduler([])
    scheduler.identity = identity(folder, "scheduler")
    await scheduler.start()
    mesh = Mesh([scheduler.address])
    with pytest.raises(StatusError, match="no scheduler answers"):
        await mesh.fleet()
    await mesh.close()
    await scheduler.stop()


async def test_calls_on_replaced_channels_hold_no_stop_up(folder: Path) -> None:
    clock = Clock()
    scheduler = FakeScheduler([])
    scheduler.identity = identity(folder, "scheduler", clock)
    await scheduler.start()
    mesh = Mesh([scheduler.address], clock=clock, identity=identity(folder, "gateway", clock))
    scheduler.gate.clear()
    queued = mesh.in_turn()[0].stub.Place(PLACE)
    await queued.read()
    authority.make(folder, renew=True)
    clock.now = 1.0
    await mesh.fleet()
    async with asyncio.timeout(10):
        await mesh.close()
    queued.cancel()
    await scheduler.stop()


FINISH = scheduler_pb2.FinishRequest(request_id="a", epoch=1)


async def test_a_finish_outlives_an_outage_of_a_minute() -> None:
    clock, scheduler = Clock(), FakeScheduler([])
    await scheduler.start()
    await scheduler.stop()
    mesh = Mesh([scheduler.address], MeshLimits(backoff=0.001), clock)
    mesh.finish(FINISH)
    clock.now = 59.0
    await asyncio.sleep(0)
    await scheduler.start(scheduler.address)
    assert list(await scheduler.finishes.until_length(1)) == [FINISH]
    await until(lambda: mesh.num_finishing == 0)
    await mesh.close()
    await scheduler.stop()


async def test_a_finish_is_given_up_after_a_minute() -> None:
    clock = Clock()
    mesh = Mesh(["127.0.0.1:1"], MeshLimits(backoff=0.001), clock)
    mesh.finish(FINISH)
    await asyncio.sleep(0)
    assert mesh.num_finishing == 1
    clock.now = 61.0
    await until(lambda: mesh.num_finishing == 0)
    await mesh.close()


async def test_pending_finishes_are_bounded_and_hold_no_stop_up() -> None:
    mesh = Mesh(["127.0.0.1:1"], MeshLimits(max_finishing=3), Clock())
    for _ in range(9):
        mesh.finish(FINISH)
    assert mesh.num_finishing == 3
    async with asyncio.timeout(10):
        await mesh.close(patience_seconds=0.01)
