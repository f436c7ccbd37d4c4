"""Realtime among batch requests on one worker: what each was promised, against no preemption and against first come, first served.

Batch requests of three orgs come at twice what the worker can do, three fifths of them from one org; realtime ones at a fifth of it
(Poisson both). Each way runs on a mesh of its own; beside it, realtime alone on the idle worker, and what batch requests alone reach. A
way's window is followed until the last request has ended. Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from bench.figure import line, show
from bench.mesh import Mesh, org_token, started
from bench.serving import Timing, closed_loop, open_loop, percentile
from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ORGS = {"acme": 0.6, "birch": 0.2, "cedar": 0.2}
"""Of the batch requests: each of the three offers more than its third of what is served, so that only order makes them equal."""
REALTIME_ORG = "dove"
REALTIME_SHARE, BATCH_LOAD = 0.2, 2.0
REALTIME, STANDARD, BATCH = types_pb2.LATENCY_CLASS_REALTIME, types_pb2.LATENCY_CLASS_STANDARD, types_pb2.LATENCY_CLASS_BATCH
TARGETS = {"rt_requests": 2000.0, "rt_p99_ttft_ratio": 2.0, "batch_share": 0.85, "jain_orgs": 0.97, "unfinished": 0.0}
_CLIENTS = 48  # of a closed loop that keeps the worker's slots taken


@dataclass(frozen=True)
class Kind:
    """One kind of request. FIFO is one class and one org for all: then nothing but arrival decides."""

    prompt_tokens: int
    output_tokens: int
    latency_class: types_pb2.LatencyClass.ValueType


CHAT, DOCUMENT = Kind(32, 16, REALTIME), Kind(130, 64, BATCH)


@dataclass(frozen=True)
class Way:
    """How the mesh runs, and whether it is told of classes and orgs."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    blind: bool = False


NO_PREEMPTION = {"FOREBAY_PREEMPTION": "false"}
WAYS = (
    Way("classes"),
    Way("no_preemption", NO_PREEMPTION),
    Way("fifo", {**NO_PREEMPTION, "FOREBAY_QUEUE_ORDER": "arrival"}, blind=True),
)


@dataclass
class Tally:
    """What clients saw of one org: timings of requests that ended, and how many failed."""

    timings: list[Timing] = field(default_factory=list)
    num_failed: int = 0

    def tokens(self, start: float, end: float) -> float:
        """That arrived in this time."""
        return sum(
            tokens for t in self.timings for at, tokens in zip(t.arrivals, t.tokens, strict=True) if start <= at < end
        )  # all arrivals of a request are known by the time that it is asked


class Clients:
    """Asks one mesh over gRPC in the name of several orgs."""

    def __init__(self, mesh: Mesh, channel: grpc.aio.Channel, *, blind: bool, seed: str) -> None:
        self._mesh = mesh
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._blind = blind
        self._rng = random.Random(seed)
        self._tokens = {org: org_token(mesh, org) for org in (*ORGS, REALTIME_ORG)}
        self.tallies = {org: Tally() for org in (*ORGS, REALTIME_ORG)}

    async def send(self, org: str, kind: Kind) -> Timing:
        """One request; a failed one is counted and has no arrivals."""
        prompt = [self._rng.randrange(100, self._mesh.vocab_size - 100) for _ in range(kind.prompt_tokens)]
        request = inference_pb2.GenerateRequest(
            tokens=types_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(max_tokens=kind.output_tokens, temperature=0.0, ignore_eos=True, speculation=False),
            latency_class=STANDARD if self._blind else kind.latency_class,
        )
        token = self._tokens[REALTIME_ORG if self._blind else org]
        timing, tally = Timing(time.perf_counter()), self.tallies[org]
        try:
            async for event in self._stub.Generate(request, metadata=(("authorization", f"Bearer {token}"),)):
                if event.WhichOneof("event") == "delta":
                    timing.arrived(len(event.delta.token_ids))
                elif event.WhichOneof("event") == "finished":
                    timing.ended(event.finished.usage.completion_tokens)
        except grpc.aio.AioRpcError as error:
            say(f"{org}: {error.code().name}: {error.details()}")
        if timing.end:
            tally.timings.append(timing)
        else:
            tally.num_failed += 1
        return timing

    async def document(self) -> Timing:
        """A batch request of one of the three orgs."""
        (org,) = self._rng.choices(list(ORGS), list(ORGS.values()))
        return await self.send(org, DOCUMENT)


@dataclass
class Seen:
    """One way's rounds, or realtime alone's: times to first token, batch tokens by org, what they were out of."""

    ttft: list[float] = field(default_factory=list)
    org_tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ORGS, 0.0))
    seconds: float = 0.0
    capacity_tokens: float = 0.0  # that batch alone would have made in these seconds
    num_unfinished: int = 0


@dataclass(frozen=True)
class Capacity:
    """Of the worker, by kind alone: requests and output tokens a second."""

    chats: float
    documents: float

    @property
    def document_tokens(self) -> float:
        return self.documents * DOCUMENT.output_tokens


async def capacity(mesh: Mesh, seconds: float) -> Capacity:
    """Closed loops that keep every slot taken."""
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        clients = Clients(mesh, channel, blind=False, seed="capacity")
        rates = []
        for send in (partial(clients.send, REALTIME_ORG, CHAT), clients.document):
            begun = time.perf_counter()
            await closed_loop(send, _CLIENTS, 2 * _CLIENTS, nothing)  # warm, and a first idea of the rate
            count = max(2 * _CLIENTS, round(seconds * 2 * _CLIENTS / (time.perf_counter() - begun)))
            timings = await closed_loop(send, _CLIENTS, count, nothing)
            rates.append(steady_rate(timings))
    return Capacity(*rates)


def steady_rate(timings: Sequence[Timing]) -> float:
    """Requests a second between the first and the last tenth of the ends: neither the start's ramp nor the last ones' emptying."""
    ends = sorted(timing.end for timing in timings)
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    return (last - first) / (ends[last] - ends[first])


async def mixed(mesh: Mesh, way: Way, rates: Capacity, seconds: float, round_: int, seen: Seen) -> None:
    """One window of both kinds, and the rest of its requests to their end."""
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        clients = Clients(mesh, channel, blind=way.blind, seed=f"mixed {round_}")
        chats, documents = REALTIME_SHARE * rates.chats, BATCH_LOAD * rates.documents
        start = time.perf_counter()
        await asyncio.gather(
            open_loop(clients.document, documents, round(documents * seconds), random.Random(f"batch {round_}"), nothing),
            open_loop(
                partial(clients.send, REALTIME_ORG, CHAT), chats, round(chats * seconds), random.Random(f"realtime {round_}"), nothing
            ),
        )
    window = start + 0.2 * seconds, start + 0.95 * seconds  # once both kinds are there, and while both still come
    chat = clients.tallies[REALTIME_ORG]
    seen.ttft += [t.ttft for t in chat.timings if t.start >= window[0]]
    for org in ORGS:
        seen.org_tokens[org] += clients.tallies[org].tokens(*window)
    seen.seconds += window[1] - window[0]
    seen.capacity_tokens += (window[1] - window[0]) * rates.document_tokens * (1 - REALTIME_SHARE)
    seen.num_unfinished += sum(tally.num_failed for tally in clients.tallies.values())


async def alone(mesh: Mesh, rates: Capacity, seconds: float, round_: int, seen: Seen) -> None:
    """The same realtime requests on the idle worker."""
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        clients = Clients(mesh, channel, blind=False, seed=f"alone {round_}")
        chats = REALTIME_SHARE * rates.chats
        await open_loop(
            partial(clients.send, REALTIME_ORG, CHAT), chats, round(chats * seconds), random.Random(f"realtime {round_}"), nothing
        )
    seen.ttft += [t.ttft for t in clients.tallies[REALTIME_ORG].timings]


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 0.0


def figures(idle: Seen, ways: Mapping[str, Seen]) -> Iterator[dict[str, object]]:
    """The promised figures bare, the other ways' with their name."""
    yield line("rt_requests", float(len(ways["classes"].ttft)), "requests", TARGETS["rt_requests"])
    yield line("rt_alone_ttft_p50", 1e3 * percentile(idle.ttft, 0.5), "ms")
    yield line("rt_alone_ttft_p99", 1e3 * percentile(idle.ttft, 0.99), "ms")
    for name, seen in ways.items():
        suffix = "" if name == "classes" else f"_{name}"
        yield line(f"rt_ttft_p50{suffix}", 1e3 * percentile(seen.ttft, 0.5), "ms")
        yield line(f"rt_ttft_p99{suffix}", 1e3 * percentile(seen.ttft, 0.99), "ms")
        yield line(f"batch_tokens_per_s{suffix}", sum(seen.org_tokens.values()) / seen.seconds, "tok/s")
        values = {
            "rt_p99_ttft_ratio": percentile(seen.ttft, 0.99) / percentile(idle.ttft, 0.99),
            "batch_share": sum(seen.org_tokens.values()) / seen.capacity_tokens,
            "jain_orgs": jain(list(seen.org_tokens.values())),
            "unfinished": float(seen.num_unfinished),
        }
        for figure, value in values.items():
            target = TARGETS[figure] if not suffix else None
            at_most = figure in ("rt_p99_ttft_ratio", "unfinished")
            yield line(f"{figure}{suffix}", value, "requests" if figure == "unfinished" else "x", target, at_most=at_most)


def nothing() -> None:
    """Progress that nobody shows."""


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Reads the arguments, runs, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.classes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of realtime alone and of classes; the other ways run in the first")
    parser.add_argument("--seconds", type=float, default=40.0, help="a window; at twice the capacity its requests take as long again")
    parser.add_argument("--ways", nargs="+", default=[way.name for way in WAYS], choices=[way.name for way in WAYS])
    arguments = parser.parse_args()
    idle, ways = Seen(), {way.name: Seen() for way in WAYS if way.name in arguments.ways or way.name == "classes"}
    measured: list[Capacity] = []
    for round_ in range(arguments.rounds):
        for way in WAYS:
            if way.name not in ways or (round_ and way.name != "classes"):
                continue
            with started([], way.environment) as mesh:
                if not measured or way.name == "classes":
                    measured.append(asyncio.run(capacity(mesh, arguments.seconds / 4)))
                    asyncio.run(alone(mesh, measured[-1], arguments.seconds / 2, round_, idle))
                asyncio.run(mixed(mesh, way, measured[-1], arguments.seconds, round_, ways[way.name]))
            say(f"round {round_ + 1}/{arguments.rounds}: {way.name}")
    show(line("batch_capacity", statistics.median(rates.document_tokens for rates in measured), "tok/s"))
    show(line("rt_capacity", statistics.median(rates.chats for rates in measured), "requests/s"))
    for figure in figures(idle, ways):
        show(figure)


if __name__ == "__main__":
    main()
