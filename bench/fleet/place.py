"""How long one choice of a worker takes in a large fleet whose caches are well known: microseconds, in one thread, no Redis."""

import argparse
import gc
import random
import time
from dataclasses import replace

from bench.figure import line, show
from services.scheduler.policy.fleet import ServedModel, Worker
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.node import NodeState, StepCost
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import plan
from services.scheduler.policy.rules import Rules

MODEL, HASH_TOKENS, HASHES_PER_PROMPT = "m@bf16", 64, 200


def fleet(num_workers: int, rng: random.Random) -> list[Worker]:
    """Workers of one model, each with some load."""
    model = {MODEL: ServedModel("v1", 16, 1 << 16, 1 << 17)}
    nodes = [NodeState(StepCost(0.005 * f, 20e-6 * f, 1e-5, 5e-8), max_step_tokens=2048) for f in (1.0, 3.0)]
    return [
        replace(
            Worker(f"w{i}", f"i{i}", f"host-{i}:1", 64, 66, model, node=nodes[i % 2]),
            used_slots=(0, 0, used, 0),
            used_blocks=(0, 0, 400 * used, 0),
        )
        for i in range(num_workers)
        for used in (rng.randrange(60),)
    ]


def prompts(num_hashes: int, rng: random.Random) -> list[str]:
    """Prompts' names with so many different hashes in all: a quarter of each is a beginning that many share."""
    shared = HASHES_PER_PROMPT // 4
    heads = [[f"{rng.getrandbits(64):016x}" for _ in range(shared)] for _ in range(8)]
    num_prompts = (num_hashes - 8 * shared) // (HASHES_PER_PROMPT - shared)
    tails = ([f"{rng.getrandbits(64):016x}" for _ in range(HASHES_PER_PROMPT - shared)] for _ in range(num_prompts))
    return ["".join([*rng.choice(heads), *tail]) for tail in tails]


def ticket(number: int, block_hashes: str) -> Ticket:
    """One with that prompt."""
    num_tokens = HASHES_PER_PROMPT * HASH_TOKENS
    return Ticket(f"r{number}", "org", 2, MODEL, "v1", num_tokens + 9, 512, block_hashes=block_hashes, hash_tokens=HASH_TOKENS)


def measure(num_workers: int, num_hashes: int, num_choices: int, seed: int = 1) -> list[float]:
    """Seconds of each choice, sorted."""
    rng = random.Random(seed)
    workers, known, memory, rules = fleet(num_workers, rng), prompts(num_hashes, rng), Memory(), Rules()
    for number, names in enumerate(known):
        memory.committed(ticket(number, names), workers[rng.randrange(num_workers)], 1000, 0.0)
    times = []
    gc.freeze()
    for number in range(num_choices):
        names = rng.choice(known)
        # Half of them go on from a known prompt, half share its beginning alone.
        names = names if number % 2 else names[: len(names) // 4] + "".join(f"{rng.getrandbits(64):016x}" for _ in range(150))
        order = Order([Fifo([ticket(number, names)])], rules)
        began = time.perf_counter()
        (placement,) = plan(order, workers, rules, memory, now=0.0, draw=rng.randrange)
        times.append(time.perf_counter() - began)
        assert placement.decision is not None
    return sorted(times)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--hashes", type=int, default=200_000)
    parser.add_argument("--choices", type=int, default=5000)
    arguments = parser.parse_args()
    times = measure(arguments.workers, arguments.hashes, arguments.choices)
    show(line("policy_place_p50_us", 1e6 * times[len(times) // 2], "us"))
    show(line("policy_place_p99_us", 1e6 * times[int(len(times) * 0.99)], "us", 1000, at_most=True))


if __name__ == "__main__":
    main()
