"""Channels under mutual TLS: made anew when the certificate has changed, without harm to the calls that are open."""

import asyncio
from pathlib import Path

import pytest

from forebay.v1 import scheduler_pb2, worker_pb2
from services.cli import authority
from services.common.errors import StatusError
from services.common.tls import Identity, role_name
from services.gateway.mesh import Mesh
from tests.fakes import FakeScheduler, FakeWorker, play
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
    with mesh.worker(worker.address) as stub:
        return len([message async for message in stub.Generate(worker_pb2.WorkerServiceGenerateRequest(request_id="r"), timeout=10)])


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
