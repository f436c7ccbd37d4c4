"""Gateways that die, clients that leave, read slowly or have no time; and hosts that lack something."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc

from bench.chaos.fleet import Fleet
from bench.chaos.process import until
from bench.chaos.traffic import Flow, Stream, prompt, streams
from bench.chaos.trial import Row, Trial, at_random
from bench.chaos.worker import MODEL
from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, types_pb2
from services.scheduler import keys

BATCH, REALTIME = 3, 1


async def gateway_killed(trial: Trial) -> None:
    """Its streams fail at once; what they held is free in 10 s; asked again elsewhere with its key, the answer is the same, billed once.

    Some are asked again at once, while their workers still compute for the dead gateway, the others when nobody does any more.
    """
    number = trial.number % 2
    victim = trial.fleet.gateways[number]
    before, salt = await _billed(trial.fleet), trial.rng.randbytes(8).hex()
    planned = [Stream(prompt(), 400, seed=index, gateway=number, key=f"{salt}-{index}") for index in range(16)]
    mine = trial.flow(planned, survive=False)
    others = trial.flow([Stream(prompt(), 100, gateway=1 - number) for _ in range(8)])
    await mine.until(lambda stream: stream.num_received >= 5)
    pid = victim.pid
    killed_at = time.monotonic()
    await trial.fleet.kill(victim, after=1.0)
    trial.prove(f"pid {pid} is gone", not victim.lives or victim.pid != pid)
    for stream in await mine.end(20):
        late = stream.ended_at - killed_at
        trial.expect(
            f"a stream failed as UNAVAILABLE within 2 s, not {stream.error} after {late:.1f}", stream.error == "UNAVAILABLE" and late < 2
        )
    again = [await _again(trial, planned[:8], 1 - number)]
    await others.end()

    async def free() -> bool:
        fleet = await trial.fleet.fleet(0)
        return not any(worker.heartbeat.num_used_blocks or worker.heartbeat.leases for worker in fleet.workers)

    await until(free, "the workers are idle", 15)
    trial.expect("workers are free within 10 s", time.monotonic() - killed_at < 14)
    again += [await _again(trial, planned[8:], 1 - number), await _again(trial, planned[:2], 1 - number)]
    known = {stream.request_id for stream in planned}
    trial.expect("each key stands for the request that it stood for", all(stream.request_id in known for flow in again for stream in flow))
    more = [now - then for now, then in zip(await _billed(trial.fleet), before, strict=True)]
    trial.expect(f"each key was billed once, as a success: {more}", more == [16 + 8, 0, 16 * 400 + 8 * 100])


async def _again(trial: Trial, streams: Sequence[Stream], gateway: int) -> list[Stream]:
    """Streams with the same keys, to their ends."""
    flow = trial.flow([Stream(stream.prompt, stream.num_tokens, seed=stream.seed, gateway=gateway, key=stream.key) for stream in streams])
    return await flow.end()


async def _billed(fleet: Fleet) -> list[int]:
    """Requests, failed ones and tokens in the org's usage records; once nothing is left to be settled."""

    async def settled() -> bool:
        return not await fleet.redis.scard(keys.live("dev"))

    await until(settled, "all requests are settled", 15)
    async with grpc.aio.insecure_channel(fleet.schedulers[0].environment["FOREBAY_LISTEN_ADDRESS"]) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        usage = await stub.GetUsage(admin_pb2.GetUsageRequest(org="dev", days=2), timeout=5)
    return [
        sum(row.num_requests for row in usage.rows),
        sum(row.num_failed for row in usage.rows),
        sum(row.completion_tokens for row in usage.rows),
    ]


async def client_leaves(trial: Trial) -> None:
    """At any time: queued, computed, decoding, preempted, at its end. More than there is room for, of all classes."""
    planned = [
        Stream(
            prompt(trial.rng.choice((4, 40, 400))),
            trial.rng.randint(1, 120),
            seed=index % 2,
            latency_class=trial.rng.choice((1, 2, 3)),
            gateway=index % 2,
        )
        for index in range(150)
    ]
    flow = Flow(trial.traffic, planned)

    async def leave(task: "asyncio.Task[Stream]") -> None:
        await at_random(trial, 0, 2.5)
        task.cancel()

    await asyncio.gather(*map(leave, flow.tasks))
    await asyncio.gather(*flow.tasks, return_exceptions=True)
    trial.prove("some left before their end", any(not stream.ended for stream in planned))
    trial.expect("nothing wrong was said before", not any(stream.wrong for stream in planned if not stream.ended))
    began = time.monotonic()

    async def idle() -> bool:
        fleet = await trial.fleet.fleet(0)
        return not any(worker.heartbeat.num_running or worker.heartbeat.num_waiting for worker in fleet.workers)

    await until(idle, "the workers compute nothing any more", 10)
    trial.expect("all work stopped within 2 s", time.monotonic() - began < 2.0)  # a heartbeat is a second


async def deadlines(trial: Trial) -> None:
    """Past on arrival, in the queue, in prefill, while decoding: DEADLINE_EXCEEDED, in time."""
    planned = [
        Stream(
            prompt(trial.rng.choice((4, 600))),
            1000,
            latency_class=trial.rng.choice((2, 3)),
            gateway=index % 2,
            deadline=trial.rng.choice((0.0005, 0.3, 0.8, 1.5)),
        )
        for index in range(100)
    ]
    flow = trial.flow(planned, survive=False)
    await flow.end()
    for stream in planned:
        late = stream.seconds - stream.deadline
        # The bound is 250 ms on an idle machine; this one also runs the clients.
        trial.expect(f"ended as DEADLINE_EXCEEDED, not {stream.error}", stream.error == "DEADLINE_EXCEEDED")
        trial.expect(f"ended {late:.2f} s behind its deadline", late < 1.0)
    trial.prove("some ended with tokens, some without", {bool(stream.num_received) for stream in planned} == {True, False})


async def slow_reader(trial: Trial) -> None:
    """A client that stops reading: it ends by policy, and the others' streams don't feel it."""
    request = inference_pb2.GenerateRequest(
        model=MODEL, tokens=types_pb2.TokenIds(ids=prompt()),
        sampling=types_pb2.SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0, logprobs=20),
    )  # fmt: skip
    calls = [trial.traffic.stub(0).Generate(request, metadata=trial.fleet.metadata, timeout=120) for _ in range(4)]
    for call in calls:
        await call.read()  # and nothing more
    flow = trial.flow(streams(8, 400))
    await flow.end()
    trial.prove("it was not read to its end", not any(call.done() for call in calls))
    for call in calls:
        call.cancel()


async def telemetry_gone(trial: Trial) -> None:
    """A worker that is told of a GPU which nobody can read: it serves, and says nothing of what it doesn't know."""
    worker = trial.fleet.workers[0]
    await worker.stop(10)
    worker.environment["FOREBAY_DEVICE"] = "cuda:0"
    await worker.start()
    await trial.fleet.whole()
    flow = trial.flow(streams(16, 60))
    await flow.end()
    state = next(state for state in (await trial.fleet.fleet(0)).workers if state.registration.worker_id == "w0")
    trial.prove("no temperature is told", not state.heartbeat.HasField("temperature_celsius"))
    trial.expect("no figure is not a number", not await _tells_nan(trial.fleet))
    await worker.stop(10)
    del worker.environment["FOREBAY_DEVICE"]
    await worker.start()


async def _tells_nan(fleet: Fleet) -> bool:
    text = await fleet.metrics(fleet.workers[0])
    return any(row.lower().endswith(" nan") for row in text.splitlines() if not row.startswith("#"))


async def host_is_full(trial: Trial) -> None:
    """In turn: log pipes that nobody reads, a disk without room for logs and flight records, few open files."""
    way = trial.number % 3
    victims = (*trial.fleet.workers, *trial.fleet.schedulers, *trial.fleet.gateways)
    for process in victims:
        process.hardship = ("blocked log", "full disk", "few files")[way]
    await trial.fleet.restart(victims)
    await trial.fleet.whole()
    trial.prove("they run under it", all(process.feels_hardship for process in victims))
    flow = trial.flow(streams(48, 60), survive=False)
    ended = await flow.end()
    trial.expect("most are served", sum(stream.succeeded for stream in ended) >= 24)
    trial.expect("no silence over 5 s", all(stream.longest_gap < 5 for stream in ended))
    for process in victims:
        process.hardship = ""
    await trial.fleet.restart(victims)


ROWS = (
    Row("F09", "SIGKILL of a gateway in mid-stream", gateway_killed),
    Row("F15", "clients that stop reading", slow_reader, has_gap=True),
    Row("F16", "150 clients that leave at any time", client_leaves, 20, 100),
    Row("F17", "100 deadlines in every state", deadlines, 20),
    Row("F30", "a GPU whose telemetry nobody can read", telemetry_gone),
    Row("F31", "logs that block, a full disk, few open files", host_is_full),
)
