"""What must be as before once nobody asks anything any more: leases, blocks, slots, tickets, streams, calls."""

import asyncio
import time

import grpc
import httpx

from bench.chaos.fleet import Fleet
from services.scheduler import keys

IDLE_SECONDS = 30.0


async def leaks(fleet: Fleet, seconds: float = IDLE_SECONDS) -> dict[str, float]:
    """Gauges that are not back at nothing in time, by name."""
    until = time.monotonic() + seconds
    while found := await _busy(fleet):
        if time.monotonic() > until:
            return found
        await asyncio.sleep(0.05)
    return {}


async def _busy(fleet: Fleet) -> dict[str, float]:
    try:
        gauges = {**await _workers(fleet), **await _store(fleet), **await _gateways(fleet), **await _schedulers(fleet)}
    except (grpc.aio.AioRpcError, httpx.HTTPError, OSError) as error:
        return {f"unreachable: {type(error).__name__}": 1}
    return {name: value for name, value in gauges.items() if value}


async def _workers(fleet: Fleet) -> dict[str, float]:
    gauges: dict[str, float] = {}
    for worker in (await fleet.fleet(0)).workers:
        beat, name = worker.heartbeat, worker.registration.worker_id
        gauges |= {
            f"{name}.running": beat.num_running,
            f"{name}.waiting": beat.num_waiting,
            f"{name}.blocks": beat.num_used_blocks,
            f"{name}.leases": len(beat.leases),
        }
    return gauges


async def _store(fleet: Fleet) -> dict[str, float]:
    redis = fleet.redis
    gauges = {
        "queues": float(await redis.scard(keys.QUEUES)),
        "waiting": float(await redis.hlen(keys.WAITING)),
        "held": float(await redis.zcard(keys.HELD)),
        "starting": float(await redis.zcard(keys.STARTING)),
        "running": float(await redis.zcard(keys.RUNNING)),
        "live": float(await redis.scard(keys.live("dev"))),
    }
    for worker in fleet.workers:
        name = worker.environment["FOREBAY_WORKER_ID"]
        gauges[f"{name}.stored_leases"] = float(await redis.scard(keys.leases(name)))
        room = await redis.hgetall(keys.worker(name))
        gauges[f"{name}.slots"] = sum(float(room[field]) for field in room if str(field).startswith("slots:"))
    return gauges


async def _gateways(fleet: Fleet) -> dict[str, float]:
    return {f"{gateway.name}.requests": await fleet.metric(gateway, "forebay_requests_in_flight") for gateway in fleet.gateways}


async def _schedulers(fleet: Fleet) -> dict[str, float]:
    return {f"{scheduler.name}.streams": await fleet.metric(scheduler, "forebay_place_streams") for scheduler in fleet.schedulers}
