"""A mesh of real processes with ports and files of its own: Valkey, two schedulers, two gateways, workers on BlockRunner.

Every link that a row may break goes through a Proxy: schedulers to Valkey, workers to schedulers, gateways to workers.
"""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import jwt
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from redis.asyncio import Redis

from bench.chaos import tokenizer
from bench.chaos.process import Process, until
from bench.chaos.proxy import Proxy, to_address, to_socket
from bench.chaos.worker import MODEL
from forebay.v1 import admin_pb2, admin_pb2_grpc
from services.cli import keys, valkey

LEASE_SECONDS = 3.0
_TIMES = {"FOREBAY_LEASE_SECONDS": str(LEASE_SECONDS), "FOREBAY_LOG_LEVEL": "info"}


def free_port() -> int:
    """One that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """Start it once and break it again and again; `whole` mends what a row has left broken."""

    def __init__(self, folder: Path, *, num_workers: int = 2, worker: Mapping[str, str] | None = None) -> None:
        """`worker`: settings of every worker beside those that it needs."""
        self.folder = folder
        self._worker_settings = dict(worker or {})
        self._num_workers = num_workers
        self.valkey_socket = folder / "valkey.sock"
        self.valkey: Process
        self.schedulers: list[Process] = []
        self.gateways: list[Process] = []
        self.workers: list[Process] = []
        self.redis_links: list[Proxy] = []  # by scheduler
        self.worker_links: list[Proxy] = []  # gateways to a worker, by worker
        self.attach_links: list[list[Proxy]] = []  # a worker to a scheduler, by worker and scheduler
        self._respawning: dict[str, asyncio.Task[None]] = {}
        self.num_deaths = 0  # ends that a respawn followed
        self._channels: list[grpc.aio.Channel] = []

    # --- up and down

    async def start(self) -> None:
        """Returns when every process listens and every worker takes work."""
        self.identity = keys.ensure(self.folder / "keys")
        self._token = self._make_token()
        tokenizer.write(self.folder / "model")
        self.valkey = Process("valkey", self._valkey_command(), {}, self.folder)
        await self.start_valkey()
        self.redis = Redis(unix_socket_path=str(self.valkey_socket), decode_responses=True)
        await asyncio.gather(*(self._add_scheduler(number) for number in range(2)))
        await asyncio.gather(*(self._add_worker(number) for number in range(self._num_workers)), *(self._add_gateway(n) for n in range(2)))
        await self.whole()

    async def stop(self) -> None:
        """Ends everything."""
        for task in self._respawning.values():
            task.cancel()
        for process in [*self.gateways, *self.workers, *self.schedulers, self.valkey]:
            if process.lives:
                process.signal(signal.SIGCONT)
                await process.kill()
        for link in self._links:
            await link.stop()
        for channel in self._channels:
            await channel.close()
        await self.redis.aclose()

    def _valkey_command(self) -> list[str]:
        options = {"port": "0", "unixsocket": str(self.valkey_socket), "dir": str(self.folder), "appendonly": "yes", "save": ""}
        return [valkey.binary(), *(word for option, value in options.items() for word in (f"--{option}", value))]

    async def start_valkey(self) -> None:
        """Returns when it answers."""
        await self.valkey.start(wait=False)
        await until(partial(valkey.answers, self.valkey_socket), "Valkey answers")

    def forget_valkey(self) -> None:
        """What it keeps is gone at its next start."""
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    async def _add_scheduler(self, number: int) -> None:
        link = Proxy(to_socket(str(self.valkey_socket)))
        environment = {
            **_TIMES,
            "FOREBAY_LISTEN_ADDRESS": f"127.0.0.1:{free_port()}",
            "FOREBAY_INTERNAL_ADDRESS": f"127.0.0.1:{free_port()}",
            "FOREBAY_REDIS_URL": f"redis://{await link.start()}/0",
            "FOREBAY_SCHEDULER_ID": f"s{number}",
        }
        process = Process(f"scheduler-{number}", [sys.executable, "-m", "services.scheduler"], environment, self.folder)
        self.redis_links.append(link)
        self.schedulers.append(process)
        await process.start()

    async def _add_worker(self, number: int) -> None:
        address = f"127.0.0.1:{free_port()}"
        inwards = Proxy(to_address(address))
        outwards = [Proxy(to_address(scheduler.environment["FOREBAY_LISTEN_ADDRESS"])) for scheduler in self.schedulers]
        self.worker_links.append(inwards)
        self.attach_links.append(outwards)
        environment = {
            "FOREBAY_LISTEN_ADDRESS": address,
            "FOREBAY_ADVERTISED_ADDRESS": await inwards.start(),
            "FOREBAY_INTERNAL_ADDRESS": f"127.0.0.1:{free_port()}",
            "FOREBAY_SCHEDULERS": ",".join([await link.start() for link in outwards]),
            "FOREBAY_MODEL": MODEL,
            "FOREBAY_WORKER_ID": f"w{number}",
            "FOREBAY_FLIGHT_RECORD_FILE": str(self.folder / f"w{number}.flight"),
            "FOREBAY_DRAIN_SECONDS": "2",
            **self._worker_settings,
        }
        process = Process(f"worker-{number}", [sys.executable, "-m", "bench.chaos.worker"], environment, self.folder)
        self.workers.append(process)
        await process.start()

    async def _add_gateway(self, number: int) -> None:
        environment = {
            "FOREBAY_GRPC_ADDRESS": f"127.0.0.1:{free_port()}",
            "FOREBAY_HTTP_ADDRESS": f"127.0.0.1:{free_port()}",
            "FOREBAY_INTERNAL_ADDRESS": f"127.0.0.1:{free_port()}",
            "FOREBAY_SCHEDULERS": ",".join(scheduler.environment["FOREBAY_LISTEN_ADDRESS"] for scheduler in self.schedulers),
            "FOREBAY_MODELS": f"{self.folder / 'model'}={MODEL}",
            "FOREBAY_JWKS_FILE": str(self.identity.jwks_path),
            "FOREBAY_JWT_ISSUER": keys.ISSUER,
            "FOREBAY_JWT_AUDIENCE": keys.AUDIENCE,
        }
        process = Process(f"gateway-{number}", [sys.executable, "-m", "services.gateway"], environment, self.folder)
        self.gateways.append(process)
        await process.start()

    async def renew(self) -> None:
        """Starts every process anew, with an empty Valkey: for whom nothing else helps."""
        await asyncio.gather(*(process.kill() for process in self._services if process.lives))
        await self.valkey.kill()
        self.forget_valkey()
        await self.start_valkey()
        for process in self._services:
            await process.start()
        await self.whole()

    async def restart(self, processes: Iterable[Process]) -> None:
        """Stops and starts them, all at once."""

        async def again(process: Process) -> None:
            await process.stop(10)
            await process.start()

        await asyncio.gather(*map(again, processes))

    @property
    def _services(self) -> list[Process]:
        return [*self.schedulers, *self.workers, *self.gateways]

    # --- what it is asked

    @property
    def _links(self) -> list[Proxy]:
        return [*self.redis_links, *self.worker_links, *(link for links in self.attach_links for link in links)]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return (("authorization", f"Bearer {self._token}"),)

    def _make_token(self) -> str:
        """Of two hours ago: no clock that a row sets back by less takes it for one from the future."""
        key = load_pem_private_key((self.folder / "keys" / "ed25519.pem").read_bytes(), password=None)
        key_id = json.loads(self.identity.jwks_path.read_bytes())["keys"][0]["kid"]
        began = int(time.time()) - 7200
        claims: dict[str, Any] = {
            "iss": keys.ISSUER,
            "aud": keys.AUDIENCE,
            "sub": "chaos",
            "owner": keys.OWNER,
            "roles": ["user", "operator"],
        }
        claims |= {"iat": began, "exp": began + 86400}
        return jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": key_id})  # type: ignore[arg-type]  # an Ed25519 key, as it was made

    def grpc_address(self, gateway: int) -> str:
        """Of a gateway's gRPC face."""
        return self.gateways[gateway].environment["FOREBAY_GRPC_ADDRESS"]

    def http_url(self, gateway: int) -> str:
        """Of a gateway's OpenAI face."""
        return f"http://{self.gateways[gateway].environment['FOREBAY_HTTP_ADDRESS']}/v1"

    async def fleet(self, scheduler: int) -> admin_pb2.GetFleetResponse:
        """As a scheduler sees it."""
        async with grpc.aio.insecure_channel(self.schedulers[scheduler].environment["FOREBAY_LISTEN_ADDRESS"]) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            answer: admin_pb2.GetFleetResponse = await stub.GetFleet(admin_pb2.GetFleetRequest(), timeout=5)
            return answer

    async def metrics(self, process: Process) -> str:
        """All that it tells Prometheus."""
        async with httpx.AsyncClient() as http:
            return (await http.get(f"http://{process.environment['FOREBAY_INTERNAL_ADDRESS']}/metrics")).text

    async def metric(self, process: Process, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels; 0 where there is none."""
        text = await self.metrics(process)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        rows = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(row.rpartition(" ")[2]) for row in rows if all(label in row for label in wanted))

    async def status(self, process: Process, path: str) -> int:
        """HTTP status of /ready or /health; 0 where nobody answers."""
        try:
            async with httpx.AsyncClient(timeout=2) as http:
                return (await http.get(f"http://{process.environment['FOREBAY_INTERNAL_ADDRESS']}{path}")).status_code
        except httpx.HTTPError:
            return 0

    # --- broken and mended

    async def kill(self, process: Process, *, after: float = 0.0) -> None:
        """SIGKILL, and a new start as a supervisor would make one."""
        await process.kill()
        self.respawn(process, after=after)

    def respawn(self, process: Process, *, after: float = 0.0) -> None:
        """Starts it again in the background once it has ended."""

        async def again() -> None:
            await process.ended(60)
            await asyncio.sleep(after)
            await process.start()

        self.num_deaths += 1
        self._respawning[process.name] = asyncio.create_task(again(), name=f"respawn {process.name}")

    def is_respawning(self, process: Process) -> bool:
        """Whether it is on its way up again."""
        task = self._respawning.get(process.name)
        return task is not None and not task.done()

    async def whole(self, seconds: float = 60.0) -> None:
        """Mends the links, starts what is dead, and waits until schedulers and gateways see every worker ready."""
        for link in self._links:
            link.heal()
        if not self.valkey.lives:
            await self.start_valkey()
        await asyncio.gather(*self._respawning.values())
        self._respawning.clear()
        for process in self._services:
            process.signal(signal.SIGCONT)
            if not process.lives:
                await process.start()
        await until(self._all_ready, "all workers are ready at all schedulers", seconds)

    async def _all_ready(self) -> bool:
        try:
            fleets = await asyncio.gather(*(self.fleet(number) for number in range(len(self.schedulers))))
        except grpc.aio.AioRpcError:
            return False
        ready = all(sum(worker.ready for worker in fleet.workers) == len(self.workers) for fleet in fleets)
        return ready and all([await self.status(gateway, "/ready") == 200 for gateway in self.gateways])


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Fleet]:
    """A fleet that is up, ended and swept away behind the block; its logs stay where the block raised."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    fleet = Fleet(folder, **options)
    try:
        await fleet.start()
        yield fleet
    except BaseException:
        print(f"logs: {folder}", file=sys.stderr)
        raise
    else:
        shutil.rmtree(folder)
    finally:
        await fleet.stop()
