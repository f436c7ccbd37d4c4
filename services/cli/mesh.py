"""Which processes a mesh on one machine has, in which order they start, and what each needs to know of the others."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.cli import authority, keys, valkey
from services.cli.client import Target
from services.cli.home import Home, Running
from services.cli.models import ModelFiles
from services.cli.options import shown
from services.cli.problem import Problem, Usage
from services.cli.supervisor import ChildSpec, Event, Supervisor
from services.common.address import join, reachable

_READY_SECONDS = 30.0
_DRAIN_SECONDS = 10
_FACES = {"grpc_address": "FOREBAY_GRPC_ADDRESS", "http_address": "FOREBAY_HTTP_ADDRESS"}

Start = Coroutine[object, object, Mapping[str, object]]


@dataclass(frozen=True)
class Plan:
    """What the command line asked for. Port 0 takes any free one."""

    models: tuple[ModelFiles, ...]
    workers: int = 1
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    level: str = "auto"
    kv_memory: str | None = None
    log_level: str = "info"
    policy: Path | None = None
    tls: bool = False
    share: bool = False
    device_memory: str | None = None
    gateways: int = 1


class Mesh:
    """One mesh from `start` to `stop`. `listener` hears of every step and every child."""

    def __init__(self, plan: Plan, home: Home, listener: Callable[[Event], None]) -> None:
        self._plan = plan
        self._home = home
        self._listener = listener
        self._supervisor = Supervisor(home.logs, listener)
        self._socket: Path | None = None
        self._internal_addresses: dict[str, str] = {}

    async def start(self) -> Running:
        """Starts everything and returns when every model answers. Problem says what stood in the way; call `stop` then, too."""
        for flag, port in (("--grpc-port", self._plan.grpc_port), ("--http-port", self._plan.http_port)):
            await _check_free(self._plan.host, port, flag)
        redis_url = await self._start_valkey()
        identity = self._make_keys()
        scheduler = await self._start("scheduler", {"FOREBAY_LISTEN_ADDRESS": "127.0.0.1:0", "FOREBAY_REDIS_URL": redis_url})
        address = str(scheduler["address"])
        # Side by side, for both read model files; the gateway comes last, so that it is the first to stop.
        environment = self._gateway_environment(address, identity)
        *_, gateway = await _all([*self._worker_starts(address), self._start_gateway(environment)])
        grpc_address, http_address = (reachable(str(gateway[face]), "127.0.0.1") for face in ("grpc_address", "http_address"))
        names = await self._wait_for_models(Target(grpc_address, identity.token))
        if self._plan.gateways > 1:
            await self._start_others(environment, gateway)
        running = Running(
            os.getpid(), grpc_address, f"http://{http_address}/v1", identity.token, names, self._supervisor.pids, self._internal_addresses
        )
        self._home.write(running)
        return running

    async def stop(self) -> None:
        """Drains and stops gateways, workers, scheduler, Valkey, in this order."""
        self._home.clear()
        await self._supervisor.stop()
        if self._socket is not None and self._socket.parent != self._home.valkey:
            self._socket.unlink(missing_ok=True)
            self._socket.parent.rmdir()

    def kill(self) -> None:
        """Ends everything at once."""
        self._supervisor.kill()

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by name."""
        return self._supervisor.pids

    async def _start_valkey(self) -> str:
        self._socket = valkey.socket_path(self._home.valkey)
        await self._supervisor.start(valkey.spec(self._home.valkey, self._socket))
        return f"unix://{self._socket}"

    def _make_keys(self) -> keys.Identity:
        self._listener(Event("keys", "starting"))
        identity = keys.ensure(self._home.keys)
        if self._plan.tls:
            authority.ensure(self._home.certs)
        self._listener(Event("keys", "listening", {"renewed": identity.renewed}))
        return identity

    def _worker_starts(self, scheduler_address: str) -> list[Start]:
        plan = self._plan
        entries = [f"{model.path}={model.name}" for model in plan.models]
        placed = [entry for entry in ([",".join(entries)] if plan.share else entries) for _ in range(plan.workers)]
        # Workers that share the cores would slow each other by more threads than cores.
        threads = max(1, len(os.sched_getaffinity(0)) // len(placed))
        starts: list[Start] = []
        for number, entry in enumerate(placed, start=1):
            environment = {
                "FOREBAY_LISTEN_ADDRESS": "127.0.0.1:0",
                "FOREBAY_SCHEDULERS": scheduler_address,
                "FOREBAY_MODEL": entry,
                "FOREBAY_WORKER_ID": f"worker-{number}",
                "FOREBAY_FLIGHT_RECORD_FILE": str(self._home.logs / f"worker-{number}.flight"),
                "FOREBAY_NUM_THREADS": os.environ.get("FOREBAY_NUM_THREADS", str(threads)),
            }
            if plan.level != "auto":
                environment["FOREBAY_LEVEL"] = plan.level
            if plan.kv_memory is not None:
                environment["FOREBAY_KV_MEMORY"] = plan.kv_memory
            if plan.device_memory is not None:
                environment["FOREBAY_DEVICE_MEMORY"] = plan.device_memory
                environment["FOREBAY_WEIGHTS_CACHE"] = os.environ.get("FOREBAY_WEIGHTS_CACHE", str(self._home.path / "weights"))
            starts.append(self._start("worker", environment, name=f"worker-{number}"))
        return starts

    async def _start_gateway(self, environment: Mapping[str, str]) -> Mapping[str, object]:
        """The one that says where the ports are, where any would do."""
        if self._plan.gateways == 1:
            return await self._start("gateway", environment, pins=_FACES)
        return await self._start("gateway", {**environment, "FOREBAY_SHARE_PORTS": "true"}, name="gateway-1", pins=_FACES)

    async def _start_others(self, environment: Mapping[str, str], first: Mapping[str, object]) -> None:
        """Further gateways, on the first one's ports. They come when every model is served: the kernel gives them calls at once."""
        shared = {**environment, "FOREBAY_SHARE_PORTS": "true", **{variable: str(first[face]) for face, variable in _FACES.items()}}
        await _all([self._start("gateway", shared, name=f"gateway-{number}") for number in range(2, self._plan.gateways + 1)])

    def _gateway_environment(self, scheduler_address: str, identity: keys.Identity) -> dict[str, str]:
        plan = self._plan
        models = ",".join(f"{model.path}=" + "|".join((model.name, *model.aliases)) for model in plan.models)
        return {
            "FOREBAY_GRPC_ADDRESS": join(plan.host, plan.grpc_port),
            "FOREBAY_HTTP_ADDRESS": join(plan.host, plan.http_port),
            "FOREBAY_SCHEDULERS": scheduler_address,
            "FOREBAY_MODELS": models,
            "FOREBAY_JWKS_FILE": str(identity.jwks_path),
            "FOREBAY_JWT_ISSUER": keys.ISSUER,
            "FOREBAY_JWT_AUDIENCE": keys.AUDIENCE,
        }

    async def _start(
        self, service: str, environment: Mapping[str, str], *, name: str = "", pins: Mapping[str, str] | None = None
    ) -> Mapping[str, object]:
        common = {
            "FOREBAY_LOG_LEVEL": self._plan.log_level,
            "FOREBAY_INTERNAL_ADDRESS": "127.0.0.1:0",
            "FOREBAY_DRAIN_SECONDS": str(_DRAIN_SECONDS),
        }
        if self._plan.policy is not None and service in ("scheduler", "gateway"):
            common["FOREBAY_POLICY_FILE"] = str(self._plan.policy.resolve())
        if self._plan.tls:
            common |= authority.environment(self._home.certs, service)
        pinned = {"internal_address": "FOREBAY_INTERNAL_ADDRESS", **(pins or {"address": "FOREBAY_LISTEN_ADDRESS"})}
        # -P: a folder called services where the person stands must not be taken for ours.
        command = (sys.executable, "-P", "-m", f"services.{service}")
        spec = ChildSpec(name or service, command, {**common, **environment}, pinned, stop_seconds=_DRAIN_SECONDS + 10)
        facts = await self._supervisor.start(spec)
        # Pinned, so that it holds for the process's restarts, too.
        self._internal_addresses[spec.name] = str(facts["internal_address"])
        return facts

    async def _wait_for_models(self, target: Target) -> tuple[str, ...]:
        """Returns when workers serve every model, with the names that clients may use: a policy file may give models others."""
        self._listener(Event("models", "starting"))
        deadline = asyncio.get_running_loop().time() + _READY_SECONDS
        waiting: list[str] = ["all models"]
        async with target.channel() as channel:
            while waiting:
                if asyncio.get_running_loop().time() > deadline:
                    raise Problem(f"no worker took up {', '.join(waiting)} within {_READY_SECONDS:g} s: see {self._home.logs}")
                try:
                    waiting = await self._unserved(target, channel)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        raise Problem(
                            f"the gateway refuses its own token ({error.details()}): see {self._home.logs}/gateway.log"
                        ) from error
                await asyncio.sleep(0.05)
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            listed = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=target.metadata, timeout=5)
        self._listener(Event("models", "listening"))
        offered = [model.name for model in listed.models]
        names = [model.name for model in self._plan.models]
        return tuple(dict.fromkeys([*(name for name in names if name in offered), *offered])) or tuple(names)

    async def _unserved(self, target: Target, channel: grpc.aio.Channel) -> list[str]:
        """Models of the plan that no worker serves yet, as the gateway sees it: what it tells here is what it goes by."""
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        fleet = await stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=target.metadata, timeout=5)
        ready = [worker.registration for worker in fleet.workers if worker.ready]
        served = {model.model.rpartition("@")[0] for worker in ready for model in worker.models if model.loaded}
        return [model.name for model in self._plan.models if model.name not in served]


async def _all(starts: Iterable[Start]) -> list[Mapping[str, object]]:
    """Runs starts side by side, begun in order. The first failure ends the wait; `stop` finds every child that was begun."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()  # does nothing to those that are done
    # What was cancelled because of another's failure must not hide it.
    for failure in [task.exception() for task in tasks if task.done()]:
        if failure is not None:
            raise failure
    return [task.result() for task in tasks]


async def _check_free(host: str, port: int, flag: str) -> None:
    """Problem where the gateway couldn't listen there. Port 0 is always free, but not on every host."""
    try:
        (family, kind, protocol, _, address), *_ = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            state = "is taken" if error.errno == errno.EADDRINUSE else "isn't for everybody"
            raise Problem(
                f"port {port} on {host} {state} ({why}): stop what uses it, or pass {flag} with another (0: any free one)"
            ) from error
        raise Usage(f"--host is {shown(host)}: it must be an address of this machine, such as 127.0.0.1 or 0.0.0.0 ({why})") from error
