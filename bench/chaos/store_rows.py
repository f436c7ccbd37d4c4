"""Redis that is killed, emptied, slow, full, read-only; and links between the mesh's parts that carry nothing."""

import asyncio
import time
from collections.abc import Iterable

from bench.chaos.process import until
from bench.chaos.proxy import Proxy
from bench.chaos.traffic import Flow, Stream, streams
from bench.chaos.trial import Row, Trial
from services.scheduler import keys

SHED_CODES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")


async def restarted(trial: Trial) -> None:
    """Killed for some seconds under streams that run; back with its append-only file, or empty."""
    fleet, empty = trial.fleet, trial.number % 2 == 1
    flow = trial.flow(streams(16, 700, deadline=90))
    await flow.until(lambda stream: stream.num_received >= 5)
    waiting = trial.flow(streams(80, 120, length=40, deadline=90))
    await until(lambda: _has_tickets(trial, 96), "all are accepted")
    await asyncio.sleep(0.3)  # Redis has them; now the schedulers have heard so, too
    pid = fleet.valkey.pid
    await fleet.valkey.kill()
    trial.prove(f"pid {pid} of Valkey is gone", not fleet.valkey.lives)
    if empty:
        fleet.forget_valkey()
    await asyncio.sleep(4)
    await fleet.start_valkey()
    back = time.monotonic()
    # What is asked within the outage may be shed; what is asked 2 s behind it may not.
    await asyncio.sleep(2)
    late = trial.flow(streams(8, 20))
    await late.end()
    trial.expect("requests are served within 10 s of its return", time.monotonic() - back < 10)
    await waiting.end()
    await flow.end()


async def _has_tickets(trial: Trial, number: int) -> bool:
    return bool(await trial.fleet.redis.scard(keys.live("dev")) == number)


async def _shed(trial: Trial, what: str, count: int = 8) -> list[Stream]:
    """Requests that can't be served: each is told so within a second (and what Python needs beside a busy machine)."""
    flow = trial.flow(streams(count, 10), survive=False)
    ended = await flow.end()
    for stream in ended:
        if not stream.succeeded:
            how = f"{stream.error} {stream.words} after {stream.seconds:.2f} s"
            trial.expect(f"{what}: shed within a second, not {how}", stream.error in SHED_CODES and stream.seconds < 1.5)
    return ended


async def in_trouble(trial: Trial) -> None:
    """Slow by 2 s a call; full; read-only. Each is shed at once and mends by itself."""
    redis, links = trial.fleet.redis, trial.fleet.redis_links
    flow = trial.flow(streams(4, 500, deadline=60))
    await flow.until(lambda stream: stream.num_received >= 5)
    for link in links:
        link.delay = 2.0
    await asyncio.sleep(1.0)
    slow = await _shed(trial, "slow")
    for link in links:
        link.heal()
    await _serves_again(trial)
    await redis.config_set("maxmemory", 1)
    full = await _shed(trial, "full")
    await redis.config_set("maxmemory", 0)
    await _serves_again(trial)
    await redis.replicaof("127.0.0.1", "1")
    readonly = await _shed(trial, "read-only")
    await redis.replicaof("NO", "ONE")
    await _serves_again(trial)
    for name, ended in (("slow", slow), ("full", full), ("read-only", readonly)):
        trial.prove(f"requests were shed while it was {name}", any(not stream.succeeded for stream in ended))
    await flow.end()


async def _serves_again(trial: Trial, seconds: float = 10.0) -> None:
    async def serves() -> bool:
        [stream] = await Flow(trial.traffic, streams(1, 4)).end()
        return stream.succeeded

    trial.expect("it serves again by itself", await _comes(serves, seconds))


async def _comes(condition: object, seconds: float) -> bool:
    try:
        await until(condition, "it serves again", seconds)
    except TimeoutError:
        return False
    return True


async def partitioned(trial: Trial) -> None:
    """Gateways to a worker, that worker to a scheduler, a scheduler to Redis: held both ways, or one way."""
    fleet = trial.fleet
    links: Iterable[Proxy]
    for name, links in (
        ("gateway-worker", [fleet.worker_links[0]]),
        ("worker-scheduler", [fleet.attach_links[0][0]]),
        ("worker-schedulers", fleet.attach_links[0]),
        ("scheduler-redis", [fleet.redis_links[0]]),
    ):
        held = [link.num_held for link in links]
        flow = trial.flow(streams(12, 300, deadline=90))
        await flow.until(lambda stream: stream.num_received >= 5)
        for link in links:
            link.hold(towards=trial.number % 3 != 1, back=trial.number % 3 != 2)
        await asyncio.sleep(7)
        trial.prove(f"{name}: something was held", any(link.num_held > before for link, before in zip(links, held, strict=True)))
        for link in links:
            link.heal()
        late = trial.flow(streams(8, 20))
        await late.end()
        await flow.end()
        await fleet.whole()


ROWS = (
    Row("F10", "SIGKILL of Redis for 4 s under streams and tickets; back with its file, or empty", restarted),
    Row("F12", "Redis slow by 2 s, full, read-only", in_trouble),
    Row("F13", "links between gateway and worker, worker and scheduler, scheduler and Redis carry nothing for 7 s", partitioned),
)
