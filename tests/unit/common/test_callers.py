"""Who may call a server's methods, on real connections: no certificate, another mesh's, another role's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from forebay.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.cli import authority
from services.common import rpc
from services.common.callers import Callers
from services.common.tls import Identity, role_name
from services.scheduler.server import CALLERS
from tests.fakes import FakeScheduler
from tests.unit.common.test_pem import files_of
from tests.unit.common.test_tls import Clock

HEALTH = health_pb2.HealthCheckRequest()
FINISH = scheduler_pb2.FinishRequest(request_id="r", epoch=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.make(tmp_path / "certs")
    return tmp_path / "certs"


def identity(folder: Path, role: str) -> Identity:
    return Identity(files_of(folder, role), role_name(role))


@asynccontextmanager
async def scheduler(mine: Identity) -> AsyncIterator[str]:
    """A scheduler's server; its address."""
    server = rpc.server([Callers(CALLERS)])
    FakeScheduler([]).register(server)
    rpc.add_standard_services(server, [], internal=True)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0', mine)}"
    await server.start()
    yield address
    await server.stop(None)


async def fails(call: "grpc.aio.UnaryUnaryCall[object, object]") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_each_role_may_call_what_is_for_it(folder: Path) -> None:
    own, gateway = identity(folder, "scheduler"), identity(folder, "gateway")
    async with scheduler(own) as address, rpc.channel(address, gateway, "scheduler") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.Finish(FINISH)
        await admin_pb2_grpc.AdminServiceStub(channel).GetFleet(admin_pb2.GetFleetRequest())
        await health_pb2_grpc.HealthStub(channel).Check(HEALTH)
        attached = stub.Attach(iter([]))
        assert await attached.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_other_roles_are_refused_by_name_and_logged_once(folder: Path, role: str) -> None:
    async with scheduler(identity(folder, "scheduler")) as address, rpc.channel(address, identity(folder, role), "scheduler") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with capture_logs() as logs:
            for _ in range(3):
                error = await fails(stub.Finish(FINISH))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert error.details() == (
            f"/forebay.v1.SchedulerService/Finish is for the role gateway; the certificate says {role}.forebay.internal"
        )
        assert [log["event"] for log in logs] == ["caller_refused"]
        place = stub.Place(scheduler_pb2.PlaceRequest())
        assert await place.code() is grpc.StatusCode.PERMISSION_DENIED
        await health_pb2_grpc.HealthStub(channel).Check(HEALTH)


async def test_who_shows_no_certificate_of_the_mesh_doesnt_get_in(folder: Path, tmp_path: Path) -> None:
    authority.make(tmp_path / "other")
    ca = authority.certificate(folder, "ca").read_bytes()
    stranger = files_of(tmp_path / "other", "gateway")
    credentials = {
        "plain": None,
        "no certificate": grpc.ssl_channel_credentials(ca),
        "another CA": grpc.ssl_channel_credentials(ca, stranger.key.read(), stranger.certificate.read()),
    }
    async with scheduler(identity(folder, "scheduler")) as address:
        for shown, given in credentials.items():
            options = [("grpc.ssl_target_name_override", role_name("scheduler"))]
            plain = given is None
            channel = grpc.aio.insecure_channel(address) if plain else grpc.aio.secure_channel(address, given, options=options)
            async with channel:
                error = await fails(health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10))
                assert error.code() is grpc.StatusCode.UNAVAILABLE, shown


async def test_a_worker_cant_pose_as_a_scheduler(folder: Path) -> None:
    async with scheduler(identity(folder, "worker")) as address, rpc.channel(address, identity(folder, "gateway"), "scheduler") as channel:
        error = await fails(health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "Hostname Verification Check failed" in (error.details() or "")


async def test_the_next_handshake_goes_by_the_files_as_they_are_then(folder: Path) -> None:
    clock = Clock()
    mine = Identity(files_of(folder, "scheduler"), role_name("scheduler"), clock=clock)
    old = identity(folder, "gateway")
    async with scheduler(mine) as address, rpc.channel(address, old, "scheduler") as before:
        await health_pb2_grpc.HealthStub(before).Check(HEALTH)
        authority.make(folder, force=True)
        clock.now = 1.0
        async with rpc.channel(address, identity(folder, "gateway"), "scheduler") as after:
            await health_pb2_grpc.HealthStub(after).Check(HEALTH)
        await health_pb2_grpc.HealthStub(before).Check(HEALTH)  # what is connected stays so
