"""Routing rules compared on simulated fleets: `make bench-routing`. Prints JSON lines, one per trace and rule, then the figures.

Traces are read from FOREBAY_TRACES (default ../shared/traces); those that aren't there are left out, and without any the sample is used.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from bench.figure import line, show
from bench.fleet.devices import LARGE, SMALL
from bench.fleet.mesh import Beats, Mesh
from bench.fleet.rivals import rivals
from bench.fleet.scenario import Scenario, scenario
from bench.fleet.trace import FILES, SAMPLE, ideal_hits, load
from services.scheduler.policy.routing import ROUTINGS
from services.scheduler.policy.rules import Rules

POLICIES = (*ROUTINGS, "random", "lmetric", "dynamo")
STALE = "stale"
"""`seconds` with heartbeats that arrive late."""
STALE_SECONDS = 0.5
LARGE_TRACE, LARGE_NODES, LARGE_REQUESTS = "mooncake_conversation", 192, 100_000


@dataclass(frozen=True)
class Task:
    """One stretch of one trace under some rules."""

    trace: str
    path: Path
    seed: int
    num_nodes: int
    num_requests: int
    policies: Sequence[str]


@dataclass(frozen=True)
class Result:
    """What one rule made of it. Seconds; hit_share of what one endless cache would have found, None where nothing could be."""

    trace: str
    policy: str
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    hit_share: float | None
    throttle_seconds: float
    wall_seconds: float


def run(task: Task) -> list[Result]:
    """All rules of a task on the same arrivals."""
    case = scenario(load(task.path), num_nodes=task.num_nodes, num_requests=task.num_requests, seed=task.seed)
    gc.freeze()  # or the collector would look at the whole trace again and again
    return [_run(task, case, policy) for policy in task.policies]


def _run(task: Task, case: Scenario, policy: str) -> Result:
    routing = {**ROUTINGS, **rivals(task.seed), STALE: ROUTINGS["seconds"]}[policy]
    beats = Beats(late=STALE_SECONDS if policy == STALE else 0.0)
    mesh = Mesh(case.nodes(), Rules(routing=routing), beats=beats, seed=task.seed)
    began = time.perf_counter()
    outcome = mesh.run(case.arrivals)
    wall = time.perf_counter() - began
    ideal = sum(ideal_hits([a.row for a in case.arrivals if a.model == model.name]) for model in (SMALL, LARGE))
    return Result(
        task.trace, policy, _quantile(outcome.ttft, 0.5), _quantile(outcome.ttft, 0.99), _quantile(outcome.tpot, 0.5),
        _quantile(outcome.tpot, 0.99), outcome.hit_tokens / ideal if ideal else None, outcome.slowed_seconds, wall,
    )  # fmt: skip


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def means(results: Sequence[Result]) -> list[Result]:
    """Over the seeds; the time that the simulation took is the longest."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.trace, result.policy), []).append(result)
    return [_mean(group) for group in groups.values()]


def _mean(group: Sequence[Result]) -> Result:
    hits = [r.hit_share for r in group if r.hit_share is not None]
    return Result(
        group[0].trace, group[0].policy, fmean(r.ttft_p50 for r in group), fmean(r.ttft_p99 for r in group),
        fmean(r.tpot_p50 for r in group), fmean(r.tpot_p99 for r in group), fmean(hits) if hits else None,
        fmean(r.throttle_seconds for r in group), max(r.wall_seconds for r in group),
    )  # fmt: skip


def losses(results: Sequence[Result]) -> dict[str, float]:
    """By trace: p99 TTFT of `seconds` over that of the best rule; late heartbeats are no rule."""
    found = {}
    for trace in dict.fromkeys(r.trace for r in results):
        p99 = {r.policy: r.ttft_p99 for r in results if r.trace == trace and r.policy != STALE}
        found[trace] = p99["seconds"] / min(p99.values())
    return found


def stale_costs(results: Sequence[Result]) -> dict[str, float]:
    """By trace: p99 TTFT of `seconds` with late heartbeats over that with timely ones."""
    p99 = {(r.trace, r.policy): r.ttft_p99 for r in results}
    return {trace: p99[trace, STALE] / p99[trace, "seconds"] for trace, policy in p99 if policy == STALE}


def tell(result: Result) -> None:
    """One line."""
    told = {k: round(v, 4) if isinstance(v, float) else v for k, v in vars(result).items()}
    print(json.dumps(told), flush=True)


def traces() -> dict[str, Path]:
    """Those that are there."""
    folder = Path(os.environ.get("FOREBAY_TRACES", "../shared/traces"))
    found = {name: folder / file for name, file in FILES.items() if (folder / file).is_file()}
    return found or {"sample": SAMPLE}


def _all(tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for results in pool.map(run, tasks):
            yield from results


def small(arguments: argparse.Namespace, paths: dict[str, Path]) -> None:
    """Every rule on every trace."""
    policies = [*arguments.policies, STALE]
    tasks = [
        Task(name, path, seed, arguments.nodes, arguments.requests, policies)
        for name, path in paths.items()
        for seed in range(1, arguments.seeds + 1)
    ]
    results = means(list(_all(tasks, arguments.jobs)))
    for result in results:
        tell(result)
    worst, stale = losses(results), stale_costs(results)
    print(json.dumps({"losses": worst, "stale_costs": stale}))
    show(line("seconds_worst_loss", max(worst.values()), "ratio", 1.02, at_most=True))
    show(line("stale_cost", max(stale.values()), "ratio", 1.10, at_most=True))


def large(arguments: argparse.Namespace, paths: dict[str, Path]) -> None:
    """Every rule on a large fleet, once."""
    name = LARGE_TRACE if LARGE_TRACE in paths else next(iter(paths))
    tasks = [Task(name, paths[name], 1, LARGE_NODES, arguments.large_requests, [policy]) for policy in arguments.policies]
    results = []
    for result in _all(tasks, arguments.jobs):
        results.append(result)
        tell(replace(result, trace=f"{name}_{LARGE_NODES}"))
    show(line("sim_192_seconds", max(r.wall_seconds for r in results), "s", 120, at_most=True))


def main() -> None:
    """Prints lines and figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=("small", "large"), default=["small", "large"])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--nodes", type=int, default=16, help="of the small fleet, a multiple of 16")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--large-requests", type=int, default=LARGE_REQUESTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at once")
    arguments = parser.parse_args()
    paths = traces()
    for part in arguments.parts:
        {"small": small, "large": large}[part](arguments, paths)
