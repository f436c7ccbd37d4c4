"""Load on a running mesh, closed loop (N clients, each at its next request at once) or open loop (Poisson arrivals).

Prints JSON lines: requests/s, output tokens/s, TTFT and ITL p50/p99, and SPEC 5's Theta_max beside each throughput. Finds the mesh
as `forebay run` does; `--start` brings one up for the run. Lengths are fixed, or drawn from an Azure trace with --trace.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc
import orjson
from rich.console import Console
from rich.progress import Progress, TaskID

from bench.lengths import Lengths, fixed, from_trace
from bench.mesh import HttpFace, Mesh, find, started
from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.worker import throughput


@dataclass
class Timing:
    """One request as its client saw it, in seconds of the load generator's clock."""

    start: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    end: float = 0.0

    def arrived(self, tokens: float) -> None:
        """A message with so many tokens; one without is no news."""
        if tokens:
            self.arrivals.append(time.perf_counter())
            self.tokens.append(tokens)

    def ended(self, num_tokens: int) -> None:
        """The end, with the usage's count: what the messages seemed to hold is scaled to it."""
        self.end = time.perf_counter()
        scale = num_tokens / sum(self.tokens)
        self.tokens = [tokens * scale for tokens in self.tokens]

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.start

    @property
    def gaps(self) -> Iterator[float]:
        """Seconds per token between messages: a message of k tokens counts as k gaps of a k-th each."""
        for before, after, tokens in zip(self.arrivals, self.arrivals[1:], self.tokens[1:], strict=False):
            yield from [(after - before) / tokens] * max(1, round(tokens))


Ask = Callable[[list[int], int, int, Timing], Awaitable[None]]
"""(prompt ids, output tokens, seed, what to note arrivals and the end in)"""


def grpc_client(mesh: Mesh, channel: grpc.aio.Channel) -> Ask:
    """Asks over InferenceService.Generate."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def ask(prompt: list[int], max_tokens: int, seed: int, timing: Timing) -> None:
        sampling = types_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=seed)
        request = inference_pb2.GenerateRequest(tokens=types_pb2.TokenIds(ids=prompt), sampling=sampling)
        async for event in stub.Generate(request, metadata=mesh.metadata):
            if event.WhichOneof("event") == "delta":
                timing.arrived(len(event.delta.token_ids))
            elif event.WhichOneof("event") == "finished":
                timing.ended(event.finished.usage.completion_tokens)

    return ask


def http_session() -> aiohttp.ClientSession:
    """As many connections as there are requests, each with all the time that it takes. It shares the cores, so it must cost little."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


def http_client(face: HttpFace, client: aiohttp.ClientSession) -> Ask:
    """Asks over POST /v1/completions with server-sent events. A chunk counts by its text's share, as it doesn't tell its tokens."""

    async def ask(prompt: list[int], max_tokens: int, seed: int, timing: Timing) -> None:
        body = {
            "model": face.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {face.token}"} if face.token else {}
        async with client.post(f"{face.url}/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.read())[:300]!r}")
            async for event in response.content:
                if not event.startswith(b"data: {"):
                    continue
                chunk = orjson.loads(event[6:])
                if chunk["choices"]:
                    timing.arrived(len(chunk["choices"][0]["text"]))
                if chunk.get("usage"):
                    timing.ended(chunk["usage"]["completion_tokens"])

    return ask


async def one(ask: Ask, lengths: Lengths, rng: random.Random, vocab_size: int) -> Timing:
    """Sends one request of its own random prompt and times what comes back."""
    prompt_tokens, output_tokens = lengths(rng)
    prompt = [rng.randrange(100, vocab_size - 100) for _ in range(prompt_tokens)]
    timing = Timing(time.perf_counter())
    await ask(prompt, output_tokens, rng.getrandbits(31), timing)
    return timing


async def closed_loop(
    send: Callable[[], Coroutine[None, None, Timing]], clients: int, requests: int, advance: Callable[[], None]
) -> list[Timing]:
    """`clients` at once, each sending its next request when its last has ended, until `requests` are done."""
    timings: list[Timing] = []
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            timings.append(await send())
            advance()

    await asyncio.gather(*(client() for _ in range(clients)))
    return timings


async def open_loop(
    send: Callable[[], Coroutine[None, None, Timing]], rate: float, requests: int, rng: random.Random, advance: Callable[[], None]
) -> list[Timing]:
    """Poisson arrivals of `rate` a second, whatever is still running."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    tasks: list[asyncio.Task[Timing]] = []
    for _ in range(requests):
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - loop.time()))
        task = asyncio.create_task(send())
        task.add_done_callback(lambda _: advance())
        tasks.append(task)
    return list(await asyncio.gather(*tasks))


def percentile(values: list[float], q: float) -> float:
    """The q-th quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def report(label: str, timings: list[Timing], extra: dict[str, float]) -> None:
    """Prints the run's figures, a JSON line each."""
    seconds = max(t.end for t in timings) - min(t.start for t in timings)
    tokens = sum(sum(t.tokens) for t in timings)
    ttft = [t.ttft for t in timings if t.arrivals]
    gaps = [gap for t in timings for gap in t.gaps]
    figures = {
        f"requests_per_s_{label}": (len(timings) / seconds, "req/s"),
        f"output_tokens_per_s_{label}": (tokens / seconds, "tok/s"),
        f"ttft_p50_{label}": (percentile(ttft, 0.5) * 1e3, "ms"),
        f"ttft_p99_{label}": (percentile(ttft, 0.99) * 1e3, "ms"),
        f"itl_p50_{label}": (percentile(gaps, 0.5) * 1e3, "ms"),
        f"itl_p99_{label}": (percentile(gaps, 0.99) * 1e3, "ms"),
    } | {f"{name}_{label}": (value, "seq") for name, value in extra.items()}
    for name, (value, unit) in figures.items():
        print(json.dumps({"figure": name, "value": round(value, 3), "unit": unit}), flush=True)


async def resident_sequences(mesh: Mesh, channel: grpc.aio.Channel, mean_length: float) -> float:
    """SPEC 5: K_max blocks * block size / mean sequence length, at most the batch slots; summed over the workers."""
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    fleet = await stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=mesh.metadata)
    by_worker = (
        throughput.resident_sequences(
            num_blocks=m.num_blocks, block_size=m.block_size, mean_length=mean_length, max_sequences=w.registration.max_sequences
        )
        for w in fleet.workers
        for m in w.registration.models
    )
    return sum(by_worker)


async def run(args: argparse.Namespace, mesh: Mesh) -> None:
    """Runs every asked-for load in turn."""
    lengths = from_trace(Path(args.trace), args.scale) if args.trace else fixed(args.prompt_tokens, args.output_tokens)
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(mesh.grpc_address))
        client = await stack.enter_async_context(http_session())
        ask = grpc_client(mesh, channel) if args.face == "grpc" else http_client(mesh.http, client)
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        seats = await resident_sequences(mesh, channel, lengths.mean)
        loads = [("c", float(c)) for c in args.concurrency] + [("r", r) for r in args.rate]
        for kind, amount in loads:
            rng = random.Random(f"{args.seed} {kind}{amount}")  # no prompt twice: the prefix cache must not help
            task = progress.add_task(f"{'concurrency' if kind == 'c' else 'rate'} {amount:g}", total=args.requests)

            def advance(task: TaskID = task) -> None:
                progress.advance(task)

            async def send(rng: random.Random = rng) -> Timing:
                return await one(ask, lengths, rng, mesh.vocab_size)

            await send()  # warm, not counted
            if kind == "c":
                timings = await closed_loop(send, int(amount), max(args.requests, int(amount)), advance)
            else:
                timings = await open_loop(send, amount, args.requests, rng, advance)
            report(f"{args.face}_{kind}{amount:g}", timings, {"resident_bound": seats})


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", choices=["grpc", "http"], default="http", help="which API to ask over")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16, 64], help="closed-loop clients, one run each")
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="open-loop requests per second, one run each")
    parser.add_argument("--requests", type=int, default=64, help="requests per run")
    parser.add_argument("--prompt-tokens", type=int, default=130)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--trace", default="", help="an Azure LLM inference CSV: lengths are drawn from it")
    parser.add_argument("--scale", type=float, default=0.1, help="factor on the trace's lengths, to fit the model's context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", action="store_true", help="start a mesh for this run and stop it after")
    parser.add_argument("--up", default="", help="with --start: more words for `forebay up`")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Finds or starts the mesh and runs."""
    args = parse(sys.argv[1:] if argv is None else argv)
    with started(args.up.split()) if args.start else contextlib.nullcontext(find()) as mesh:
        asyncio.run(run(args, mesh))


if __name__ == "__main__":
    main()
