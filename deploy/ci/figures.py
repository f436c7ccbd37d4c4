"""What is measured of a stack that was built: one function per thing, in the order in which they are done."""

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx

from bench.figure import line
from deploy.ci import frozen
from deploy.ci.load import Gateway, Load, Stream, answer
from deploy.ci.stack import CORE, PROJECT, Stack, command_lines, is_healthy, wait_until
from forebay.v1 import admin_pb2, admin_pb2_grpc

Figures = Iterator[dict[str, object]]

_GATEWAY_PORTS = (50051, 8000)
_SERVICE_PORTS = (*_GATEWAY_PORTS, 50052, 50061, 6379, 9090)
# Every port of the gateway, where a closed one answers at once; the services' ports of the others, where most are silent.
_SCAN = """
import json, socket, sys
def is_open(host, port, seconds):
    with socket.socket() as s:
        s.settimeout(seconds)
        return s.connect_ex((host, port)) == 0
gateway, others, ports = json.loads(sys.argv[1])
found = [["gateway", p] for p in range(1, 65536) if is_open(gateway, p, 1)]
print(json.dumps(found + [[name, p] for name, host in others for p in ports if is_open(host, p, 0.3)]))
"""
# Who shows no certificate and greets as gRPC's HTTP/2 does, with and without TLS: does the port greet back?
_GREET = """
import json, socket, ssl, sys
def greets(host, port, tls):
    try:
        s = socket.create_connection((host, port), 2)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            s = context.wrap_socket(s)
        s.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        return s.recv(9)[3:4] == bytes([4])
    except OSError:
        return False
print(json.dumps([host for host, port in json.loads(sys.argv[1]) if greets(host, port, False) or greets(host, port, True)]))
"""


def all_of(stack: Stack, gateway: Gateway) -> Figures:
    """Every figure. The stack is up afterwards."""
    yield from images(stack)
    yield from start(stack, gateway)
    yield from trace(stack)
    yield from targets(stack)
    yield from reach(stack)
    yield from strangers(stack)
    yield from containment(stack)
    yield from worker_killed(stack, gateway)
    yield from worker_hung(stack, gateway)
    yield from gateway_recreated(stack, gateway)


def images(stack: Stack) -> Figures:
    """Their sizes, with what the base image has, and that torch is where it is used alone."""
    without_torch = 0
    for service, limit in (("gateway", 400), ("scheduler", 400), ("worker", 1500)):
        image = f"forebay-{service}:0.1.0"
        yield line(f"{service}_image_megabytes", stack.image_megabytes(image), "MB", limit, at_most=True)
        look = "import importlib.util; print(importlib.util.find_spec('torch') is None)"
        without_torch += stack.docker("run", "--rm", "--network", "none", image, "python", "-c", look).strip() == "True"
    yield line("images_without_torch", without_torch, "images", 2)


def start(stack: Stack, gateway: Gateway) -> Figures:
    """Up, from built images to every container healthy, and a first question over HTTP."""
    begun = time.monotonic()
    stack.compose("up", "--detach", "--wait", "--wait-timeout", "120")
    yield line("healthy_seconds", time.monotonic() - begun, "s", 60, at_most=True)
    with gateway.client() as client:
        wait_until(lambda: client.get("/ready").status_code == 200, 30, "the gateway is ready")
        begun = time.monotonic()
        text = answer(client, gateway, max_tokens=32)
        seconds = time.monotonic() - begun
        embedded = client.post("/v1/embeddings", json={"model": gateway.embedding, "input": ["Paris", "a river"]}).raise_for_status()
    if "Paris" not in text:
        raise RuntimeError(f"the model's answer is wrong: {text!r}")
    yield line("completion_seconds", seconds, "s", 30, at_most=True)
    yield line("embedded_inputs", len(embedded.json()["data"]), "inputs", 2)


def trace(stack: Stack) -> Figures:
    """Forebay's services in one trace that reached the stand-in for the collector."""

    def most() -> int:
        services: dict[str, set[str]] = defaultdict(set)
        printed = stack.compose("logs", "--no-log-prefix", "collector").splitlines()
        for span in (json.loads(text) for text in printed if text.startswith("{")):
            services[span["trace"]].add(span["service"])
        return max(map(len, services.values()), default=0)

    with suppress(TimeoutError):
        wait_until(lambda: most() >= 3, 20, "spans of three services in one trace")
    yield line("trace_services", most(), "services", 3)


def targets(stack: Stack) -> Figures:
    """What Prometheus scrapes by deploy/prometheus/prometheus.yml; every target must be up."""
    url = f"http://{stack.address('prometheus', 'mesh')}:9090/api/v1/targets?state=active"

    def health() -> list[str]:
        found = httpx.get(url, trust_env=False).json()["data"]["activeTargets"]
        return [target["health"] for target in found]

    wait_until(lambda: "unknown" not in health(), 30, "every target was scraped")
    states = health()
    yield line("prometheus_targets_up", states.count("up"), "targets", max(6, len(states)))


def reach(stack: Stack) -> Figures:
    """Ports that a container on the front network finds open, and published ones, beside the gateway's two."""
    containers = {service: stack.inspect(service) for service in CORE}
    others = [
        (f"{service} in {network}", found["IPAddress"])
        for service, container in containers.items()
        for network, found in container["NetworkSettings"]["Networks"].items()
        if (service, network) != ("gateway", f"{PROJECT}_front")
    ]
    asked = json.dumps([stack.address("gateway", "front"), others, _SERVICE_PORTS])
    run = ("run", "--rm", "--network", f"{PROJECT}_front", "--entrypoint", "python3", "forebay-gateway:0.1.0", "-ISc", _SCAN, asked)
    found = json.loads(stack.docker(*run))
    promised = [["gateway", port] for port in _GATEWAY_PORTS]
    missing = [entry for entry in promised if entry not in found]
    if missing:
        raise RuntimeError(f"the scan didn't find the gateway's own ports: {missing}")
    published = [
        [service, binding]
        for service, container in containers.items()
        for port, bindings in (container["HostConfig"]["PortBindings"] or {}).items()
        for binding in bindings
        if service != "gateway" or int(port.split("/")[0]) not in _GATEWAY_PORTS or binding["HostIp"] != "127.0.0.1"
    ]
    yield line("ports_beside_the_gateways", len(found) - len(promised) + len(published), "ports", 0, at_most=True)


def strangers(stack: Stack) -> Figures:
    """Schedulers and workers that speak with a container on their own network that has no certificate. The gateway's face must."""
    asked = json.dumps([("gateway", 50051), *((f"scheduler-{n}", 50052) for n in (1, 2)), *((f"worker-{n}", 50061) for n in (1, 2))])
    run = ("run", "--rm", "--network", f"{PROJECT}_mesh", "--entrypoint", "python3", "forebay-gateway:0.1.0", "-ISc", _GREET, asked)
    found = json.loads(stack.docker(*run))
    if "gateway" not in found:
        raise RuntimeError("the gateway's gRPC face doesn't answer")
    yield line("services_without_certificates", len(found) - 1, "services", 0, at_most=True)


def containment(stack: Stack) -> Figures:
    """Containers that are held as compose.yaml says, as the engine sees it, and the password's traces in what others may see."""
    containers = [stack.inspect(service) for service in CORE]
    held = 0
    for container in containers:
        host = container["HostConfig"]
        limits = all(host[limit] for limit in ("Memory", "NanoCpus", "PidsLimit"))
        privileges = host["CapDrop"] == ["ALL"] and "no-new-privileges:true" in host["SecurityOpt"]
        held += limits and privileges and host["ReadonlyRootfs"] and container["Config"]["User"] == "10001:10001"
    yield line("contained", held, "containers", len(CORE))
    password = (Path(stack.environment["FOREBAY_SECRETS"]) / "valkey_password").read_text().strip()
    seen = json.dumps(containers) + command_lines(containers) + stack.compose("logs")
    yield line("passwords_in_sight", seen.count(password), "times", 0, at_most=True)
    ask = "import socket; s = socket.create_connection(('valkey', 6379), 2); s.sendall(b'PING\\r\\n'); print(s.recv(64).decode())"
    refused = stack.compose("exec", "-T", "scheduler-1", "python3", "-ISc", ask).startswith("-NOAUTH")
    yield line("valkey_refuses_strangers", int(refused), "times", 1)


def worker_killed(stack: Stack, gateway: Gateway) -> Figures:
    """SIGKILL of a worker under load: the other one answers, the restart policy brings it back, and it says what it died with."""
    with fleet(stack) as workers, Load(gateway) as load:
        before = ready(workers(), "worker-1")
        wait_until(lambda: load.num_answered >= 8, 60, "answers under load")
        pid = stack.inspect("worker-1")["State"]["Pid"]
        wait_until(lambda: stopped_in_a_step(stack, "worker-1", pid), 60, "worker-1 is in a step")
        os.kill(pid, signal.SIGKILL)
        seconds = wait_until(lambda: ready(workers(), "worker-1") not in ("", before), 90, "worker-1 takes work again")
        wait_until(lambda: is_healthy(stack.inspect("worker-1")), 60, "worker-1 is healthy again")
        told = [len(w.registration.died_with) for w in workers() if w.registration.worker_id == "worker-1"]
    yield line("worker_back_seconds", seconds, "s", 30, at_most=True)
    yield line("worker_killed_answers", load.num_answered, "answers", 8)
    yield line("worker_killed_errors", len(load.errors), "errors", 0, at_most=True)
    yield line("worker_died_with", sum(told), "requests", 1)


def worker_hung(stack: Stack, gateway: Gateway) -> Figures:
    """The thread of a worker's steps stands still for ever: its watchdog ends the process, which the restart policy starts again."""
    with fleet(stack) as workers, Load(gateway, patience=60) as load:
        before = ready(workers(), "worker-2")
        wait_until(lambda: ready(workers(), "worker-2", busy=True) != "", 60, "worker-2 has work")
        with frozen.busiest_thread(stack.inspect("worker-2")["State"]["Pid"]):
            seconds = wait_until(lambda: ready(workers(), "worker-2") not in ("", before), 120, "worker-2 takes work again")
        answered = load.num_answered
        wait_until(lambda: load.num_answered >= answered + 8, 60, "answers after the hang")
        restarts = stack.inspect("worker-2")["RestartCount"]
    yield line("worker_hung_back_seconds", seconds, "s", 60, at_most=True)
    yield line("worker_hung_restarts", restarts, "restarts", 1)
    yield line("worker_hung_errors", len(load.errors), "errors", 0, at_most=True)


def stopped_in_a_step(stack: Stack, worker: str, pid: int) -> bool:
    """Whether the worker's process was in a step, by its flight record. Then it is stopped; else it goes on."""
    volume = Path(stack.docker("volume", "inspect", f"{PROJECT}_workers", "--format", "{{.Mountpoint}}").strip())
    os.kill(pid, signal.SIGSTOP)
    length = int.from_bytes((volume / f"{worker}.flight").read_bytes()[:4], "little")
    if length == 0:
        os.kill(pid, signal.SIGCONT)
    return length > 0


@contextmanager
def fleet(stack: Stack) -> Iterator[Callable[[], Sequence[admin_pb2.WorkerState]]]:
    """What asks for the workers as operators see them."""
    token = (Path(stack.environment["FOREBAY_SECRETS"]) / "token").read_text().strip()
    metadata = (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(f"127.0.0.1:{stack.environment['FOREBAY_GRPC_PORT']}") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        yield lambda: stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=metadata, timeout=5).workers


def ready(workers: Iterable[admin_pb2.WorkerState], worker_id: str, *, busy: bool = False) -> str:
    """The incarnation of this worker, where it takes work; "" where not. `busy`: where it also runs something."""
    found = (worker for worker in workers if worker.ready and worker.registration.worker_id == worker_id)
    return next((worker.registration.incarnation for worker in found if worker.heartbeat.num_running or not busy), "")


def gateway_recreated(stack: Stack, gateway: Gateway) -> Figures:
    """The only gateway replaced under load: its streams end, and who tries again gets an answer. A single try may find nobody."""
    streams = [Stream(gateway, num_tokens=300) for _ in range(2)]
    with Load(gateway, patience=90) as load:
        for stream in streams:
            stream.start()
        wait_until(lambda: all(stream.begun.is_set() for stream in streams), 60, "streams have begun")
        before, begun = stack.inspect("gateway")["Id"], time.monotonic()
        stack.compose("up", "--detach", "--no-deps", "--force-recreate", "--no-build", "--wait", "gateway")
        seconds = time.monotonic() - begun
        if stack.inspect("gateway")["Id"] == before:
            raise RuntimeError("the gateway's container is the old one")
        answered = load.num_answered
        wait_until(lambda: load.num_answered >= answered + 8, 60, "answers of the new gateway")
    for stream in streams:
        stream.join(60)
    yield line("recreate_seconds", seconds, "s", 60, at_most=True)
    yield line("recreate_errors", len(load.errors), "errors", 0, at_most=True)
    yield line("recreate_cut_streams", sum(not stream.whole for stream in streams), "streams", 0, at_most=True)
    yield line("recreate_lost_tries", load.num_lost_tries, "tries")
