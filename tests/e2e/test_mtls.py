"""Case X07: what a stranger finds of a mesh whose services speak mutual TLS, and how it goes on when its certificates are replaced."""

import ipaddress
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forebay.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cli import authority
from services.cli.home import Home
from services.common.tls import role_name
from tests.e2e.mesh import Mesh, Operator, running, wait_until


@pytest.fixture(scope="module")
def tls_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One that the network may reach."""
    with running(tmp_path_factory.mktemp("tls") / "home", "--tls", "--host", "0.0.0.0") as mesh:
        yield mesh


def ports(mesh: Mesh, child: str) -> dict[int, bool]:
    """Ports that a process listens on, and whether others than this machine reach them."""
    sockets = psutil.Process(mesh.processes[child]).net_connections("inet")
    return {socket.laddr.port: _is_open(socket.laddr.ip) for socket in sockets if socket.status == psutil.CONN_LISTEN}


def _is_open(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None  # gRPC listens on ::ffff:127.0.0.1
    return not (mapped or address).is_loopback


def grpc_addresses(mesh: Mesh) -> dict[str, str]:
    """Where scheduler and worker serve gRPC: the port that isn't their internal HTTP's."""
    running = Home(mesh.home).read()
    assert running is not None
    internal = {int(address.rpartition(":")[2]) for address in running.internal_addresses.values()}
    found = {child: [port for port in ports(mesh, child) if port not in internal] for child in ("scheduler", "worker-1")}
    return {child: f"127.0.0.1:{port}" for child, [port] in found.items()}


def channel(address: str, role: str, folder: Path, *, by: Path | None = None, shown: str = "") -> grpc.Channel:
    """To a service of that role, showing the certificate of `shown` made by the CA in `by`, or none."""
    pair = [authority.key(by, shown).read_bytes(), authority.certificate(by, shown).read_bytes()] if by else []
    credentials = grpc.ssl_channel_credentials(authority.certificate(folder, "ca").read_bytes(), *pair)
    return grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", role_name(role))])


def answer(channel: grpc.Channel) -> grpc.StatusCode:
    """Of a health check."""
    with channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_only_the_gateways_two_ports_are_for_others(tls_mesh: Mesh) -> None:
    given = {int(tls_mesh.grpc_address.rpartition(":")[2]), int(tls_mesh.http_base_url.split(":")[2].split("/")[0])}
    found = {child: ports(tls_mesh, child) for child in tls_mesh.processes}
    assert {port for listening in found.values() for port, is_open in listening.items() if is_open} == given
    assert found["valkey"] == {}  # a Unix socket alone
    assert {child: len(listening) for child, listening in found.items()} == {"valkey": 0, "scheduler": 2, "worker-1": 2, "gateway": 3}


@pytest.mark.parametrize(("child", "role"), [("scheduler", "scheduler"), ("worker-1", "worker")])
def test_internal_grpc_answers_no_stranger(tls_mesh: Mesh, tmp_path: Path, child: str, role: str) -> None:
    authority.make(tmp_path / "other")
    folder, address = Home(tls_mesh.home).certs, grpc_addresses(tls_mesh)[child]
    assert answer(grpc.insecure_channel(address)) is grpc.StatusCode.UNAVAILABLE
    assert answer(channel(address, role, folder)) is grpc.StatusCode.UNAVAILABLE
    assert answer(channel(address, role, folder, by=tmp_path / "other", shown="gateway")) is grpc.StatusCode.UNAVAILABLE
    assert answer(channel(address, role, folder, by=folder, shown="worker")) is grpc.StatusCode.OK


def test_a_workers_certificate_opens_nothing_but_attach(tls_mesh: Mesh) -> None:
    folder, addresses = Home(tls_mesh.home).certs, grpc_addresses(tls_mesh)
    with channel(addresses["scheduler"], "scheduler", folder, by=folder, shown="worker") as to_scheduler:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
        for call in (stub.Place(scheduler_pb2.PlaceRequest()), stub.Finish.future(scheduler_pb2.FinishRequest())):
            assert call.code() is grpc.StatusCode.PERMISSION_DENIED
    with channel(addresses["worker-1"], "worker", folder, by=folder, shown="worker") as to_worker:
        generate = worker_pb2_grpc.WorkerServiceStub(to_worker).Generate(worker_pb2.WorkerServiceGenerateRequest())
        assert generate.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_new_ca_is_taken_up_while_the_mesh_runs(tls_mesh: Mesh) -> None:
    assert "Paris" in ask(tls_mesh)
    authority.make(Home(tls_mesh.home).certs, force=True)
    os.kill(tls_mesh.processes["scheduler"], signal.SIGKILL)  # what comes back knows the new CA alone
    with tls_mesh.operator() as operator:
        wait_until(lambda: not is_served(operator), "the scheduler is gone")
        wait_until(lambda: is_served(operator), "worker and gateway have found the new one")
    assert "Paris" in ask(tls_mesh)


def is_served(operator: Operator) -> bool:
    """Whether the gateway sees a scheduler with a ready worker."""
    try:
        return any(worker.ready for worker in operator.fleet().workers)
    except grpc.RpcError:
        return False


def ask(mesh: Mesh) -> str:
    """A short answer."""
    with mesh.openai() as client:
        chat = client.chat.completions.create(
            model=mesh.model, messages=[{"role": "user", "content": "Name the capital of France."}], temperature=0, max_tokens=16
        )
    return chat.choices[0].message.content or ""
