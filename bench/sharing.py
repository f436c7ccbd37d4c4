"""What models gain by sharing a device: `make bench-sharing`. Random weights, library level: no gateway, no wire.

Six models with room for the weights of three, in bursts to one model after another, as rarely used models are used; beside them one
process per model with an equal part of the same memory. The switch of a model of over a gigabyte beside a memcpy of its bytes. Two busy
models beside each alone, and who alternates two that don't fit. Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import ctypes
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from bench.figure import line, show
from bench.sharing_adversary import adversary
from bench.sharing_device import LARGE, OUTPUT, PROMPT, SMALL, Device, Served, make, request, serve
from bench.sharing_residents import between_residents, pool_moves
from services.worker.engine.engine import EngineRequest
from services.worker.engine.kernels.memory import large_pages
from services.worker.sharing.residency import MIN_STAY_SECONDS

NAMES = [f"m{index}" for index in range(6)]
NUM_PLACES = 3
POPULARITY = [1 / rank**1.2 for rank in range(1, len(NAMES) + 1)]
BURST, BURST_GAP = 8, 3.0  # requests, seconds between the beginnings of two
OWN_SEQUENCES = 2  # that fit into the cache of a process of its own: of its memory 98 % are weights, as with six of 13 GB on 80
NUM_THREADS = len(os.sched_getaffinity(0))


def bursts(count: int, gap: float, size: int, seed: int) -> list[tuple[float, EngineRequest]]:
    """(second, request): each burst to one model, within half a second."""
    rng = random.Random(seed)
    arrivals = []
    models = [*NAMES, *rng.choices(NAMES, POPULARITY, k=count)][:count]
    rng.shuffle(models)
    for burst, model in enumerate(models):
        for index in range(size):
            at = burst * gap + rng.uniform(0, 0.5)
            arrivals.append((at, request(f"{burst}-{index}", model, SMALL.vocab_size, rng)))
    return arrivals


def kv_bytes(num_sequences: int) -> int:
    """Of the cache of so many, at bf16, with a block's rounding."""
    return num_sequences * (PROMPT + OUTPUT + 16) * SMALL.kv_bytes_per_token(2)


# --- one process per model


def _own_process(model: str, arrivals: Sequence[tuple[float, EngineRequest]], pipe: Connection) -> None:
    torch.set_num_threads(1)
    device = make(SMALL, [model], None, kv_bytes(OWN_SEQUENCES), NUM_THREADS)
    serve(device, [(0.0, arrivals[0][1])])
    pipe.send(None)
    pipe.recv()
    pipe.send(serve(device, arrivals))


def separately(arrivals: Sequence[tuple[float, EngineRequest]]) -> Served:
    """All models at once, each in a process with its part of the memory and as many threads as it likes."""
    context = multiprocessing.get_context("spawn")
    processes = []
    for model in sorted({arrival.model for _, arrival in arrivals}):
        ours, theirs = context.Pipe()
        own = [(at, arrival) for at, arrival in arrivals if arrival.model == model]
        processes.append((context.Process(target=_own_process, args=(model, own, theirs), daemon=True), ours))
        processes[-1][0].start()
    for _, pipe in processes:
        pipe.recv()
    for _, pipe in processes:
        pipe.send(None)
    each: list[Served] = [pipe.recv() for _, pipe in processes]
    for process, _ in processes:
        process.join()
    return Served(
        seconds=max(served.seconds for served in each),
        cpu_seconds=sum(served.cpu_seconds for served in each),
        num_requests=sum(served.num_requests for served in each),
        num_answered=sum(served.num_answered for served in each),
        num_tokens=sum(served.num_tokens for served in each),
        latencies=[latency for served in each for latency in served.latencies],
    )


def traffic(num_bursts: int) -> None:
    """Six models on room for three; and the gain over six processes."""
    separate_bytes = len(NAMES) * kv_bytes(OWN_SEQUENCES)
    device = make(SMALL, NAMES, NUM_PLACES, separate_bytes, NUM_THREADS)
    saved = (len(NAMES) - NUM_PLACES) * device.weight_bytes
    device = make(SMALL, NAMES, NUM_PLACES, separate_bytes + saved, NUM_THREADS)  # as much memory as the processes have in all
    serve(device, bursts(3, 0.0, 2, seed=99))
    assert device.weights is not None
    before = {model: resident.num_loads for model, resident in device.weights.residency.residents.items()}
    arrivals = bursts(num_bursts, BURST_GAP, BURST, seed=1)
    served = serve(device, arrivals)
    loads = {model: resident.num_loads - before[model] for model, resident in device.weights.residency.residents.items()}
    bound = served.seconds / MIN_STAY_SECONDS + 1
    show(line("answered", served.num_answered / served.num_requests, "share of requests", 1.0))
    show(line("models_per_device", len({arrival.model for _, arrival in arrivals}), f"models, room for {NUM_PLACES}", 6))
    show(line("no_swap_share", served.num_without_swap / served.num_requests, "share of requests whose model was there", 0.8))
    show(line("loads", sum(loads.values()), f"in {served.seconds:.0f} s"))
    show(line("reloads_over_bound", sum(max(0.0, count - bound) for count in loads.values()), "loads", 0, at_most=True))
    show(line("shared_p95_latency", sorted(served.latencies)[int(0.95 * len(served.latencies))], "s, of a whole request"))
    at_once = [(0.0, arrival) for _, arrival in arrivals]
    together, apart = serve(device, _renamed(at_once, "again")), separately(at_once)
    show(line("shared_tokens_per_second", together.num_tokens / together.seconds, "tokens/s, all requests at once"))
    show(line("separate_tokens_per_second", apart.num_tokens / apart.seconds, "tokens/s, one process per model"))
    show(line("sharing_gain", apart.seconds / together.seconds, "times the throughput of one process per model", 1.5))
    per_token = apart.cpu_seconds / apart.num_tokens, together.cpu_seconds / together.num_tokens
    show(line("sharing_gain_by_cpu", per_token[0] / per_token[1], "times the tokens per second of CPU: on a machine that others use"))


def _renamed(arrivals: Sequence[tuple[float, EngineRequest]], name: str) -> list[tuple[float, EngineRequest]]:
    rng = random.Random(name)
    return [(at, request(f"{name} {old.request_id}", old.model, SMALL.vocab_size, rng)) for at, old in arrivals]


# --- two busy models


def two_models(num_requests: int, num_rounds: int) -> None:
    """Both resident, requests of both at once, beside as many of one."""
    device = make(SMALL, ["a", "b"], 2, 1 << 28, NUM_THREADS)
    shares = []
    for number in range(num_rounds + 1):
        rates = {}
        for models in ("a", "b", "ab"):
            rng = random.Random(f"{models}{number}")
            arrivals = [(0.0, request(f"{i}{model}", model, SMALL.vocab_size, rng)) for i in range(num_requests) for model in models]
            served = serve(device, arrivals)
            rates[models] = served.num_tokens / served.seconds
        if number:
            shares.append(rates["ab"] / statistics.mean([rates["a"], rates["b"]]))
    show(line("two_models_share", statistics.median(shares), "of the tokens/s of one alone", 0.95))


# --- the switch


def switch(num_rounds: int) -> None:
    """A request to a model in host memory, beside one to a model that is there: what it waits longer, over a memcpy of the weights."""
    device = make(LARGE, ["a", "b"], 1, 1 << 26, NUM_THREADS)
    size = device.weight_bytes
    source, target = large_pages(size).fill_(1), large_pages(size).fill_(2)
    ratios, copies, visibles = [], [], []
    now = 0.0
    first_token(device, "a", now)
    for number in range(num_rounds):
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        copy = time.perf_counter() - started
        model, now = "ba"[number % 2], now + 60.0  # the other has had its stay
        switched, warm = first_token(device, model, now), first_token(device, model, now + 1.0)
        copies.append(copy)
        visibles.append(switched - warm)
        ratios.append((switched - warm) / copy)
    show(line("switch_bytes", size, "bytes of weights"))
    show(line("switch_seconds", statistics.median(visibles), "s longer to the first token"))
    show(line("memcpy_seconds", statistics.median(copies), "s"))
    show(line("switch_ratio", statistics.median(ratios), "of one memcpy of the weights", 1.2, at_most=True))


def first_token(device: Device, model: str, now: float) -> float:
    """Seconds to the only token of a short request."""
    started = time.perf_counter()
    device.shared.add(request(f"{model} {now}", model, LARGE.vocab_size, random.Random(now), output=1, prompt=8))
    while device.shared.has_work:
        stepped = device.shared.step(now)
        device.shared.took(stepped.model, 0.0)
    return time.perf_counter() - started


def main() -> int:
    """0; what doesn't hold says so in its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bursts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("switch", "two", "adversary", "traffic"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round with the adversary")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only in (None, "switch"):
        switch(arguments.rounds)
    if arguments.only in (None, "two"):
        two_models(16, arguments.rounds)
        between_residents(arguments.rounds, NUM_THREADS)
        pool_moves(arguments.rounds, NUM_THREADS)
    if arguments.only in (None, "adversary"):
        adversary(arguments.seconds, arguments.rounds, NUM_THREADS)
    if arguments.only in (None, "traffic"):
        traffic(arguments.bursts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
