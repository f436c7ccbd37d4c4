"""Schedulers that die, are cut off from Redis, or are asked twice; tickets that nobody comes back for; clocks that are wrong."""

import asyncio
import itertools
import signal
import time
from typing import Any

import grpc

from bench.chaos.fleet import LEASE_SECONDS
from bench.chaos.process import Process, until
from bench.chaos.traffic import Flow, Stream, streams
from bench.chaos.trial import Row, Trial, at_random
from bench.chaos.worker import MODEL
from forebay.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.scheduler import keys

_PATIENCE_SECONDS, _AGAIN_SECONDS = 10.0, 0.1

_numbers = itertools.count(int(time.time() * 1000) % 10**9)


def _victim(trial: Trial) -> Process:
    return trial.fleet.schedulers[trial.number % 2]


async def _waves(trial: Trial, stop: asyncio.Event, *, count: int = 8, num_tokens: int = 40) -> list[Flow]:
    """Requests again and again until `stop`."""
    flows = []
    while not stop.is_set():
        flows.append(trial.flow(streams(count, num_tokens)))
        await asyncio.sleep(0.3)
    return flows


async def killed(trial: Trial) -> None:
    """With streams that run, requests that wait, and more that come: more than the workers have room for."""
    flow = trial.flow(streams(100, 40, length=40))
    await flow.until(lambda stream: stream.started, share=0.3)
    pid = _victim(trial).pid
    await trial.fleet.kill(_victim(trial), after=0.5)
    trial.prove(f"pid {pid} is gone", not _victim(trial).lives or _victim(trial).pid != pid)
    began = time.monotonic()
    late = trial.flow(streams(16, 20))
    await late.end()
    trial.expect("requests behind it end within 10 s", time.monotonic() - began < 10)
    await flow.end()


async def cut_off_from_redis(trial: Trial) -> None:
    """One of two schedulers goes on without Redis, in turn by a silent link, a broken one and by standing still."""
    number = trial.number % 2
    victim, link = trial.fleet.schedulers[number], trial.fleet.redis_links[number]
    failures = await trial.fleet.metric(victim, "forebay_redis_failures_total")
    stop = asyncio.Event()
    asking = asyncio.create_task(_waves(trial, stop))
    await asyncio.sleep(0.5)
    way = trial.number % 3
    if way == 0:
        link.hold()
    elif way == 1:
        link.refuses = True
        link.break_connections()
    else:
        victim.signal(signal.SIGSTOP)
        await until(lambda: victim.is_stopped, "the scheduler is stopped")
    await at_random(trial, 1.5, 3.0)
    link.heal()
    victim.signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    stop.set()
    for flow in await asking:
        await flow.end()
    if way < 2:
        trial.prove("its calls to Redis failed", await trial.fleet.metric(victim, "forebay_redis_failures_total") > failures)
    ended = [stream for stream in trial.surviving if stream.succeeded]
    trial.expect("each was recorded once", await _all_recorded_once(trial, ended))


async def _all_recorded_once(trial: Trial, ended: list[Stream]) -> bool:
    """Each request's record of use says one request and what its client got."""

    async def recorded(stream: Stream) -> bool:
        found = await trial.fleet.redis.hget(keys.ticket(stream.request_id), "recorded")
        return found is not None and f"[1,0,{len(stream.prompt)},{stream.num_received}," in found

    async def all_are() -> bool:
        return all(await asyncio.gather(*(recorded(stream) for stream in ended)))

    try:
        await until(all_are, "all are recorded", 10)
    except TimeoutError:
        return False
    return True


def _stub(trial: Trial, channels: list[grpc.aio.Channel], scheduler: int) -> Any:
    channel = grpc.aio.insecure_channel(trial.fleet.schedulers[scheduler].environment["FOREBAY_LISTEN_ADDRESS"])
    channels.append(channel)
    stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    return stub


def _ticket(name: str) -> scheduler_pb2.Ticket:
    return scheduler_pb2.Ticket(
        request_id=f"{name}-{next(_numbers)}", org="dev", latency_class=types_pb2.LATENCY_CLASS_STANDARD, model=f"{MODEL}@fp32",
        model_version="c" * 16, num_prompt_tokens=8, max_tokens=8, n=1, deadline_seconds=30.0,
    )  # fmt: skip


async def _lease(stub: Any, ticket: scheduler_pb2.Ticket) -> scheduler_pb2.Lease | None:
    """Asked as a gateway does, again while the store is away. None where another call has taken over, or the ticket has ended."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            async for response in stub.Place(scheduler_pb2.PlaceRequest(ticket=ticket), timeout=20):
                if response.HasField("placed"):
                    lease: scheduler_pb2.Lease = response.placed
                    return lease
            return None
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.ALREADY_EXISTS):
                return None
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up:
                raise
            await asyncio.sleep(_AGAIN_SECONDS)


async def _ends(stub: Any, finish: scheduler_pb2.FinishRequest) -> bool | None:
    """Whether this call ended it, asked as a gateway does, again while the store is away; None: an answer was lost on the way."""
    give_up, lost = time.monotonic() + _PATIENCE_SECONDS, False
    while True:
        try:
            ended: bool = (await stub.Finish(finish, timeout=5)).ended
            return None if lost and not ended else ended
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up:
                raise
            lost = True
            await asyncio.sleep(_AGAIN_SECONDS)


async def asked_twice(trial: Trial) -> None:
    """Each ticket goes to both schedulers several times at once, and so does its end: one lease, one record."""
    channels: list[grpc.aio.Channel] = []
    stubs = [_stub(trial, channels, number) for number in range(2)]
    used = types_pb2.Usage(prompt_tokens=8, completion_tokens=3)

    async def one(ticket: scheduler_pb2.Ticket) -> tuple[set[int], list[bool | None]]:
        leases = [lease for lease in await asyncio.gather(*(_lease(stubs[i % 2], ticket) for i in range(4))) if lease]
        epochs = {lease.epoch for lease in leases}
        finish = scheduler_pb2.FinishRequest(
            request_id=ticket.request_id, epoch=max(epochs, default=1), usage=used, finish_reason=types_pb2.FINISH_REASON_STOP
        )
        return epochs, await asyncio.gather(*(_ends(stubs[i % 2], finish) for i in range(4)))

    tickets = [_ticket("twice") for _ in range(50)]
    outcomes = await asyncio.gather(*map(one, tickets))
    trial.prove("tickets were placed", outcomes)
    trial.expect("one epoch each", all(epochs == {1} for epochs, _ in outcomes))
    trial.expect("none ends twice", all(ends.count(True) <= 1 for _, ends in outcomes))
    trial.expect("each ends, as far as answers came", all(True in ends or None in ends for _, ends in outcomes))
    recorded = [await trial.fleet.redis.hget(keys.ticket(ticket.request_id), "recorded") for ticket in tickets]
    trial.expect("each is recorded once", all(record == "[1,0,8,3,0]" for record in recorded))
    flow = trial.flow(streams(8, 20))
    await flow.end()
    for channel in channels:
        await channel.close()


async def left_behind(trial: Trial) -> None:
    """Of 300 tickets a tenth is asked for by somebody who is gone then, queued or with a lease: all of it is swept."""
    channels: list[grpc.aio.Channel] = []
    stubs = [_stub(trial, channels, number) for number in range(2)]

    async def one(number: int) -> None:
        ticket, stub = _ticket("left"), stubs[number % 2]
        if number % 20 == 0:  # gone while it waits
            call = stub.Place(scheduler_pb2.PlaceRequest(ticket=ticket))
            await asyncio.sleep(trial.rng.uniform(0, 0.01))
            call.cancel()
            return
        lease = await _lease(stub, ticket)
        if number % 20 != 1 and lease is not None:  # else gone with its lease
            await stub.Finish(
                scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, finish_reason=types_pb2.FINISH_REASON_STOP),
                timeout=5,
            )

    await asyncio.gather(*map(one, range(300)))
    trial.prove("some leases are nobody's", await trial.fleet.redis.zcard(keys.STARTING))
    for channel in channels:
        await channel.close()


async def wrong_clocks(trial: Trial) -> None:
    """A worker's and a scheduler's wall clocks are 5 minutes ahead or behind, or are set back while requests run."""
    skew = (300, -300, -3600)[trial.number % 3]
    changed = [trial.fleet.schedulers[0], trial.fleet.workers[0], trial.fleet.gateways[0]]
    for process in changed:
        process.skew = skew
    await trial.fleet.restart(changed)
    await trial.fleet.whole()
    trial.prove("their clocks are wrong", all(process.told_skew == skew for process in changed))
    stop = asyncio.Event()
    asking = asyncio.create_task(_waves(trial, stop))
    await asyncio.sleep(2 * LEASE_SECONDS)
    stop.set()
    for flow in await asking:
        await flow.end()
    epochs = [await trial.fleet.redis.hget(keys.ticket(stream.request_id), "epoch") for stream in trial.surviving if stream.request_id]
    trial.expect("no lease expired", set(epochs) <= {"1"})
    for process in changed:
        process.skew = 0.0
    await trial.fleet.restart(changed)


ROWS = (
    Row("F07", "SIGKILL of one of two schedulers, with 100 requests waiting or running", killed),
    Row("F08", "one of two schedulers cut off from Redis, or standing still", cut_off_from_redis, 20),
    Row("F21", "every ticket and every end told several times, to both schedulers", asked_twice, 20),
    Row("F22", "a tenth of the tickets is left by who asked for them", left_behind),
    Row("F23", "clocks of a scheduler, a worker and a gateway are wrong", wrong_clocks),
)
