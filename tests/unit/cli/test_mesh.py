"""Which processes a plan makes, in which order, with which environment; the processes themselves are left out."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.cli import mesh as mesh_module
from services.cli.home import Home
from services.cli.mesh import Mesh, Plan
from services.cli.models import ModelFiles
from services.cli.problem import Problem, Usage
from services.cli.supervisor import ChildSpec, Event

MODELS = (ModelFiles(Path("/m/a.gguf"), "a", ("chat",)), ModelFiles(Path("/m/b"), "b"))


class Recorder:
    """Stands where the supervisor does: notes each child and says that it listens."""

    pids: Mapping[str, int] = {"gateway": 7}

    def __init__(self) -> None:
        self.specs: list[ChildSpec] = []

    async def start(self, spec: ChildSpec) -> Mapping[str, object]:
        self.specs.append(spec)
        return {
            "address": "127.0.0.1:1",
            "grpc_address": "0.0.0.0:2",
            "http_address": "[::]:3",
            "internal_address": f"127.0.0.1:1{len(self.specs)}",
        }

    async def stop(self) -> None:
        pass


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What a mesh starts from now on."""
    recorder = Recorder()
    monkeypatch.setattr(mesh_module, "Supervisor", lambda *_: recorder)

    async def no_wait(*_: Any) -> tuple[str, ...]:
        return ("a", "b")

    monkeypatch.setattr(Mesh, "_wait_for_models", no_wait)
    return recorder


@pytest.fixture
async def specs(tmp_path: Path, recorder: Recorder) -> dict[str, ChildSpec]:
    """The children of a mesh of two models with two workers each."""
    home = Home(tmp_path)
    home.make()
    plan = Plan(MODELS, workers=2, host="0.0.0.0", grpc_port=0, http_port=0, kv_memory="64MB", policy=Path("policy.yaml"), tls=True)
    mesh = Mesh(plan, home, lambda _: None)
    with home.lock():
        running = await mesh.start()
        assert home.read() == running
    assert (running.grpc_address, running.http_base_url) == ("127.0.0.1:2", "http://127.0.0.1:3/v1")
    assert running.internal_addresses == {f"worker-{number}": f"127.0.0.1:1{number + 2}" for number in (1, 2, 3, 4)} | {
        "scheduler": "127.0.0.1:12",
        "gateway": "127.0.0.1:17",
    }
    await mesh.stop()
    assert home.read() is None
    return {spec.name: spec for spec in recorder.specs}


def test_they_start_in_order_of_need(specs: dict[str, ChildSpec]) -> None:
    assert list(specs) == ["valkey", "scheduler", "worker-1", "worker-2", "worker-3", "worker-4", "gateway"]


def test_the_policy_file_is_for_scheduler_and_gateway(specs: dict[str, ChildSpec]) -> None:
    told = {name: spec.environment["FOREBAY_POLICY_FILE"] for name, spec in specs.items() if "FOREBAY_POLICY_FILE" in spec.environment}
    assert told == dict.fromkeys(("scheduler", "gateway"), str(Path("policy.yaml").resolve()))


def test_each_service_shows_a_certificate_of_its_own_role(specs: dict[str, ChildSpec], tmp_path: Path) -> None:
    shown = {name: Path(spec.environment.get("FOREBAY_TLS_CERT_FILE", "none")).name for name, spec in specs.items()}
    workers = {f"worker-{number}": "worker.pem" for number in (1, 2, 3, 4)}
    assert shown == {"valkey": "none", "scheduler": "scheduler.pem", "gateway": "gateway.pem", **workers}
    assert Path(specs["gateway"].environment["FOREBAY_TLS_KEY_FILE"]) == Home(tmp_path).certs / "gateway.key"


def test_workers_share_models_and_cores(specs: dict[str, ChildSpec]) -> None:
    workers = [specs[f"worker-{number}"].environment for number in (1, 2, 3, 4)]
    assert [worker["FOREBAY_MODEL"] for worker in workers] == ["/m/a.gguf=a", "/m/a.gguf=a", "/m/b=b", "/m/b=b"]
    assert {worker["FOREBAY_SCHEDULERS"] for worker in workers} == {"127.0.0.1:1"}
    assert {worker["FOREBAY_KV_MEMORY"] for worker in workers} == {"64MB"}
    assert all(int(worker["FOREBAY_NUM_THREADS"]) >= 1 for worker in workers)


async def test_workers_that_share_have_every_model(tmp_path: Path, recorder: Recorder) -> None:
    home = Home(tmp_path)
    home.make()
    mesh = Mesh(Plan(MODELS, workers=2, share=True), home, lambda _: None)
    with home.lock():
        await mesh.start()
    await mesh.stop()
    workers = [spec for spec in recorder.specs if spec.name.startswith("worker")]
    assert [spec.environment["FOREBAY_MODEL"] for spec in workers] == ["/m/a.gguf=a,/m/b=b"] * 2


def test_the_gateway_knows_models_aliases_and_keys(specs: dict[str, ChildSpec]) -> None:
    environment = specs["gateway"].environment
    assert environment["FOREBAY_MODELS"] == "/m/a.gguf=a|chat,/m/b=b"
    assert environment["FOREBAY_GRPC_ADDRESS"] == "0.0.0.0:0"
    assert Path(environment["FOREBAY_JWKS_FILE"]).exists()
    assert "FOREBAY_REDIS_URL" not in environment


def test_only_the_scheduler_is_told_of_redis(specs: dict[str, ChildSpec]) -> None:
    told = [name for name, spec in specs.items() if "FOREBAY_REDIS_URL" in spec.environment]
    assert told == ["scheduler"]
    assert specs["scheduler"].environment["FOREBAY_REDIS_URL"].startswith("unix:///")


def test_a_folder_called_services_is_not_taken_for_ours(specs: dict[str, ChildSpec]) -> None:
    assert specs["gateway"].command == (sys.executable, "-P", "-m", "services.gateway")


async def test_several_gateways_share_the_first_ones_ports(tmp_path: Path, recorder: Recorder) -> None:
    home = Home(tmp_path)
    home.make()
    mesh = Mesh(Plan(MODELS, grpc_port=0, http_port=0, gateways=3), home, lambda _: None)
    with home.lock():
        running = await mesh.start()
    gateways = [spec for spec in recorder.specs if spec.name.startswith("gateway")]
    assert [spec.name for spec in gateways] == ["gateway-1", "gateway-2", "gateway-3"]
    assert all(spec.environment["FOREBAY_SHARE_PORTS"] == "true" for spec in gateways)
    ports = [(spec.environment["FOREBAY_GRPC_ADDRESS"], spec.environment["FOREBAY_HTTP_ADDRESS"]) for spec in gateways]
    assert ports == [("127.0.0.1:0", "127.0.0.1:0"), *[("0.0.0.0:2", "[::]:3")] * 2]
    assert len({running.internal_addresses[spec.name] for spec in gateways}) == 3, "each has its own metrics"
    await mesh.stop()


def test_one_gateway_shares_its_ports_with_nobody(specs: dict[str, ChildSpec]) -> None:
    assert "FOREBAY_SHARE_PORTS" not in specs["gateway"].environment


async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    import socket

    events: list[Event] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        mesh = Mesh(Plan(MODELS, http_port=port, grpc_port=0), Home(tmp_path), events.append)
        with pytest.raises(Problem, match=rf"port {port} on 127\.0\.0\.1 is taken.*--http-port"):
            await mesh.start()
    assert events == []


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a b", "x" * 70])
async def test_a_host_that_is_not_here_is_named_before_anything_starts(tmp_path: Path, host: str) -> None:
    events: list[Event] = []
    with pytest.raises(Usage, match=rf"--host is {host}: it must be an address of this machine"):
        await Mesh(Plan(MODELS, host=host, http_port=0, grpc_port=0), Home(tmp_path), events.append).start()
    assert events == []
