"""Two real workers, a thread each: against their simulation, and routing by prefix against round robin. `make bench-routing-real`.

The trace is Mooncake's conversations (FOREBAY_TRACES, else the sample) shrunk by eight, so that its blocks of 512 tokens are the 64 by
which gateways name prompts' beginnings. Its simulation has the step times that the workers fitted to requests before it, and nothing else
of them. Prints JSON lines.
"""

import argparse
import asyncio
import random
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
from prometheus_client.parser import text_string_to_metric_families

from bench.figure import line, show
from bench.fleet.compare import traces
from bench.fleet.devices import Device, StepLaw, Thermals
from bench.fleet.mesh import Arrival
from bench.fleet.mesh import Mesh as Simulation
from bench.fleet.node import Engine, Node
from bench.fleet.trace import Row, load, window
from bench.mesh import Mesh, internal_addresses, started
from bench.serving import Timing, percentile
from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.gateway.prefix import HASH_TOKENS
from services.scheduler.policy.rules import Rules

SHRINK = 8
MAX_PROMPT_TOKENS = 800
UP = ("--workers", "2", "--level", "int4")
ENVIRONMENT = {"FOREBAY_NUM_THREADS": "1", "FOREBAY_SPECULATION": "0", "FOREBAY_HOST_MEMORY": "0"}
WARM_CLIENTS = 12
STEADY = Device("cpu", 1.0, 1.0, 1.0, rise_celsius=0.0)
"""Nothing of it counts but that it doesn't warm up."""
PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 8, 512, 32, 16
CACHE_PREFIXES = 6
"""So many system prompts fit into one worker's cache, the requests that run left aside."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Prompt:
    """A request as it is sent."""

    token_ids: Sequence[int]
    num_output_tokens: int


@dataclass
class Seen:
    """What its client saw."""

    timing: Timing
    num_cached: int = 0


class Client:
    """Asks a mesh over gRPC."""

    def __init__(self, mesh: Mesh, channel: grpc.aio.Channel) -> None:
        self._mesh = mesh
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def send(self, prompt: Prompt) -> Seen:
        """Until its last token."""
        request = inference_pb2.GenerateRequest(
            tokens=types_pb2.TokenIds(ids=prompt.token_ids),
            sampling=types_pb2.SamplingParams(max_tokens=prompt.num_output_tokens, temperature=0.0, ignore_eos=True),
        )
        seen = Seen(Timing(time.perf_counter()))
        async for event in self._stub.Generate(request, metadata=self._mesh.metadata):
            if event.WhichOneof("event") == "delta":
                seen.timing.arrived(len(event.delta.token_ids))
            elif event.WhichOneof("event") == "finished":
                usage = event.finished.usage
                seen.timing.ended(usage.completion_tokens)
                seen.num_cached = usage.cached_tokens
        return seen

    async def replay(self, prompts: Sequence[Prompt], times: Sequence[float]) -> list[Seen]:
        """Each at its time, in seconds from now."""
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def later(prompt: Prompt, at: float) -> Seen:
            await asyncio.sleep(start + at - loop.time())
            return await self.send(prompt)

        return list(await asyncio.gather(*(later(*each) for each in zip(prompts, times, strict=True))))

    async def rate(self, prompts: Sequence[Prompt]) -> float:
        """Requests a second while all of them are sent by clients that keep the workers busy."""
        left, begun = iter(prompts), time.perf_counter()

        async def client() -> None:
            for prompt in left:
                await self.send(prompt)

        await asyncio.gather(*(client() for _ in range(WARM_CLIENTS)))
        return len(prompts) / (time.perf_counter() - begun)


def ids(seed: str, count: int, vocab_size: int) -> list[int]:
    """The same ones for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(100, vocab_size - 100) for _ in range(count)]


# --- against the simulation


def shrunk(rows: Sequence[Row]) -> list[Row]:
    """Those that fit the model, with an eighth of their tokens."""
    small = [
        replace(row, num_prompt_tokens=-(-row.num_prompt_tokens // SHRINK), num_output_tokens=-(-row.num_output_tokens // SHRINK))
        for row in rows
    ]
    return [
        replace(row, blocks=row.blocks[: (row.num_prompt_tokens - 1) // HASH_TOKENS])
        for row in small
        if row.num_prompt_tokens <= MAX_PROMPT_TOKENS
    ]


def prompt_of(row: Row, number: int, vocab_size: int) -> Prompt:
    """Rows that share blocks get prompts that begin alike."""
    token_ids = [token for block in row.blocks for token in ids(f"block {block}", HASH_TOKENS, vocab_size)]
    token_ids += ids(f"row {number}", row.num_prompt_tokens - len(token_ids), vocab_size)
    return Prompt(token_ids, row.num_output_tokens)


def laws(mesh: Mesh) -> Mapping[str, StepLaw]:
    """By worker: the step times that it has fitted, from its /metrics."""
    found = {}
    for name, address in internal_addresses(mesh).items():
        if name.startswith("worker"):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            parts = {s.labels["per"]: s.value for f in families for s in f.samples if s.name == "forebay_worker_step_time_seconds"}
            found[name] = StepLaw(parts["step"], parts["token"], parts["row"], parts["key"], 0.0)
    return found


async def engines(mesh: Mesh, channel: grpc.aio.Channel) -> Mapping[str, Engine]:
    """By worker: how it is set, in blocks of HASH_TOKENS."""
    fleet = await admin_pb2_grpc.AdminServiceStub(channel).GetFleet(admin_pb2.GetFleetRequest(), metadata=mesh.metadata)
    found = {}
    for worker in fleet.workers:
        r = worker.registration
        num_tokens = r.models[0].num_blocks * r.models[0].block_size
        found[r.worker_id] = Engine(num_tokens // HASH_TOKENS, HASH_TOKENS, r.max_sequences, r.max_waiting, r.max_step_tokens)
    return found


def simulated(rows: Sequence[Row], laws: Mapping[str, StepLaw], engines: Mapping[str, Engine]) -> list[tuple[float, float]]:
    """(first token, end) of each request, in seconds from its arrival, in order of arrival."""
    nodes = [Node(name, "m", law, engines[name], Thermals(STEADY, 20.0)) for name, law in laws.items()]
    for node in nodes:
        node.warm_up()
    simulation = Simulation(nodes, Rules(), asked=lambda num_output_tokens: num_output_tokens)
    jobs = simulation.run([Arrival(row, "m") for row in rows]).jobs
    return [(jobs[f"r{n}"].first_at - row.at, jobs[f"r{n}"].ended_at - row.at) for n, row in enumerate(rows)]


async def against_simulation(mesh: Mesh, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Both on the same stretch of the trace."""
    paths = traces()
    rows = shrunk(load(paths.get("mooncake_conversation", next(iter(paths.values())))))
    warm, rows = window(rows, 0, options.warm), window(rows, options.warm, options.requests)
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        client = Client(mesh, channel)
        rate = options.load * await client.rate([prompt_of(row, -1 - n, mesh.vocab_size) for n, row in enumerate(warm)])
        found = laws(mesh)
        pace = len(rows) / rate / rows[-1].at
        rows = [replace(row, at=row.at * pace) for row in rows]
        seen = await client.replay([prompt_of(row, n, mesh.vocab_size) for n, row in enumerate(rows)], [row.at for row in rows])
        foretold = simulated(rows, found, await engines(mesh, channel))
    return compared(seen, foretold, rate)


def compared(seen: Sequence[Seen], foretold: Sequence[tuple[float, float]], rate: float) -> Iterator[dict[str, object]]:
    """Medians of both, how far apart they are, and how far apart single requests are."""
    real = [s.timing.ttft for s in seen], [s.timing.end - s.timing.start for s in seen]
    simulated = [first for first, _ in foretold], [end for _, end in foretold]
    yield line("sim_requests_per_s", rate, "req/s")
    errors = []
    for name, ours, theirs in zip(("ttft", "total"), simulated, real, strict=True):
        for q in (0.5, 0.99):
            yield line(f"real_{name}_p{100 * q:g}", percentile(list(theirs), q), "s")
            yield line(f"sim_{name}_p{100 * q:g}", percentile(list(ours), q), "s")
        errors.append(abs(percentile(list(ours), 0.5) / percentile(list(theirs), 0.5) - 1))
        each = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
        yield line(f"sim_{name}_error_of_one", percentile(each, 0.5), "ratio")
    yield line("sim_error_p50", max(errors), "ratio", 0.25, at_most=True)


# --- by prefix


async def by_prefix(mesh: Mesh, options: argparse.Namespace) -> list[Seen]:
    """Requests with one of the shared system prompts each, Poisson, once the workers' step times are known."""
    rng = random.Random(options.seed)

    def prompt(number: int) -> Prompt:
        system = ids(f"system {rng.randrange(PREFIXES)}", PREFIX_TOKENS, mesh.vocab_size)
        return Prompt([*system, *ids(f"own {number}", OWN_TOKENS, mesh.vocab_size)], OUTPUT_TOKENS)

    times, now = [], 0.0
    for _ in range(options.requests):
        now += rng.expovariate(options.prefix_rate)
        times.append(now)
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        client = Client(mesh, channel)
        await client.rate([prompt(-1 - n) for n in range(4 * PREFIXES)])
        return await client.replay([prompt(n) for n in range(options.requests)], times)


def of_prefixes(seen: Mapping[str, Sequence[Seen]]) -> Iterator[dict[str, object]]:
    """Share of the system prompts' tokens that were found, and times to first tokens."""
    ttft = {}
    for name, each in seen.items():
        ttft[name] = percentile([s.timing.ttft for s in each], 0.5)
        yield line(f"prefix_hit_share_{name}", sum(s.num_cached for s in each) / (PREFIX_TOKENS * len(each)), "share")
        yield line(f"prefix_ttft_p50_{name}", ttft[name], "s")
        yield line(f"prefix_ttft_p99_{name}", percentile([s.timing.ttft for s in each], 0.99), "s")
    yield line("prefix_ttft_gain", ttft["round_robin"] / ttft["seconds"], "ratio")


def cache_blocks(block_size: int = 16) -> int:
    """Of one worker: room for CACHE_PREFIXES system prompts, and for some requests that run."""
    return (CACHE_PREFIXES * PREFIX_TOKENS + 8 * (OWN_TOKENS + OUTPUT_TOKENS)) // block_size


def on_a_mesh(run: Callable[[Mesh], Coroutine[Any, Any, Found]], environment: Mapping[str, str]) -> Found:
    """What it makes of a mesh of its own."""
    with started(UP, {**ENVIRONMENT, **environment}) as mesh:
        return asyncio.run(run(mesh))


def main() -> None:
    """Prints figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=("sim", "prefix"), default=["sim", "prefix"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--warm", type=int, default=60, help="requests before, to which step times are fitted")
    parser.add_argument("--load", type=float, default=0.6, help="of what the workers can do")
    parser.add_argument("--prefix-rate", type=float, default=3.0, help="requests a second with shared system prompts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if "sim" in options.parts:
        for figure in on_a_mesh(lambda mesh: against_simulation(mesh, options), {}):
            show(figure)
    if "prefix" in options.parts:
        seen = {}
        for routing in ("seconds", "round_robin"):
            environment = {"FOREBAY_ROUTING": routing, "FOREBAY_NUM_BLOCKS": str(cache_blocks())}
            seen[routing] = on_a_mesh(lambda mesh: by_prefix(mesh, options), environment)
        for figure in of_prefixes(seen):
            show(figure)


if __name__ == "__main__":
    main()
