"""What tracing every request costs: two meshes, one that exports all its spans to a receiver on loopback and one that makes none.

They take turns under the same closed loop over HTTP, each pair in an order of its own; the other mesh is idle meanwhile. The receiver
answers without reading, as a collector's work isn't ours. CPU time per request is told beside, by process: other load changes it least.
Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import psutil

from bench.figure import line, show
from bench.lengths import fixed
from bench.mesh import Mesh, started
from bench.serving import closed_loop, http_client, http_session, one
from services.cli.home import Home

TRACE_COST_TARGET = 0.97
PROMPT_TOKENS, OUTPUT_TOKENS = 130, 64
PROCESSES = ("gateway", "scheduler", "worker-1")


class Receiver(grpc.GenericRpcHandler):
    """Takes every export, and counts bytes and calls."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_calls = 0

    def service(self, _: Any) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """The same for every method."""
        return grpc.unary_unary_rpc_method_handler(self._take)

    def _take(self, request: bytes, _: object) -> bytes:
        self.num_bytes += len(request)
        self.num_calls += 1
        return b""


@contextmanager
def receiving() -> Iterator[tuple[str, Receiver]]:
    """(endpoint, receiver)."""
    server, receiver = grpc.server(ThreadPoolExecutor(1)), Receiver()
    server.add_generic_rpc_handlers((receiver,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", receiver
    finally:
        server.stop(None).wait()


async def throughput(mesh: Mesh, clients: int, requests: int, seed: int) -> float:
    """Output tokens a second of a closed loop."""
    async with http_session() as session:
        send = partial(one, http_client(mesh.http, session), fixed(PROMPT_TOKENS, OUTPUT_TOKENS), random.Random(seed), mesh.vocab_size)
        timings = await closed_loop(send, clients, requests, lambda: None)
    start, end = min(timing.start for timing in timings), max(timing.end for timing in timings)
    return sum(sum(timing.tokens) for timing in timings) / (end - start)


def cpu_seconds(mesh: Mesh) -> Mapping[str, float]:
    """Of each process, all threads, since its start."""
    running = Home(mesh.keys.parent).read()
    assert running is not None
    times = {name: psutil.Process(running.processes[name]).cpu_times() for name in PROCESSES}
    return {name: spent.user + spent.system for name, spent in times.items()}


def main() -> None:
    """Starts both meshes and lets them take turns."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing", description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=128, help="of each mesh and pair")
    arguments = parser.parse_args()
    seen: dict[str, list[float]] = {"off": [], "on": []}
    spent: dict[tuple[str, str], float] = defaultdict(float)
    with receiving() as (endpoint, receiver), started() as off, started([], {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}) as on:
        for pair in range(-1, arguments.pairs):  # the first warms both
            order = [("off", off), ("on", on)]
            for name, mesh in order if pair % 2 else order[::-1]:
                before = cpu_seconds(mesh)
                rate = asyncio.run(throughput(mesh, arguments.clients, arguments.requests, pair))
                if pair >= 0:
                    seen[name].append(rate)
                    for process, seconds in cpu_seconds(mesh).items():
                        spent[process, name] += seconds - before[process]
            print(f"pair {pair + 1}/{arguments.pairs}", file=sys.stderr, flush=True)
        show(line("trace_bytes_per_request", receiver.num_bytes / ((arguments.pairs + 1) * arguments.requests), "bytes"))
    for name, rates in seen.items():
        show(line(f"output_tokens_per_s_{name}", statistics.median(rates), "tok/s"))
    for (process, name), seconds in spent.items():
        show(line(f"{process}_cpu_{name}", 1e3 * seconds / (arguments.pairs * arguments.requests), "ms/request"))
    ratios = [on / off for on, off in zip(seen["on"], seen["off"], strict=True)]
    show(line("trace_cost_least", min(ratios), "x"))
    show(line("trace_cost", statistics.median(ratios), "x", TRACE_COST_TARGET))


if __name__ == "__main__":
    main()
