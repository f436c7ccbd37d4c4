"""The paper's table on one engine: static batching, padded and with finished rows dropped, beside continuous batching.

Lengths are those of the Azure traces, scaled to fit. Saturated runs give throughput, busy share, slots and cost; runs with Poisson
arrivals, at a rate that static batching can just serve, give times to first token. Beside them stands the bound: the same tokens at the
fitted step times with every slot taken. Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.figure import line, show
from bench.lengths import scaled_pairs
from bench.paper_run import BATCH, BLOCK_SIZE, MAX_MODEL_LEN, MAX_STEP_TOKENS, REALTIME, WAYS, Bench, Job, Run, StepLog, continuous
from bench.serving import percentile
from services.cli.models import default
from services.worker.throughput import resident_sequences, theta_max

TRACES = {"conv": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
BUSY_TARGET = 0.9  # offered load of the run that realtime's p99 is taken from


def fitted(logs: Sequence[StepLog]) -> list[float]:
    """Seconds of a whole step, per token, per sequence and per key: least squares of relative errors, none of them negative."""
    rows = np.array([row[:3] for log in logs for row in log.rows], dtype=np.float64)
    seconds = np.array([seconds for log in logs for seconds in log.measured])
    features = np.column_stack([np.ones(len(rows)), rows]) / seconds[:, None]
    used = list(range(features.shape[1]))
    while True:
        found = np.linalg.lstsq(features[:, used], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            by_feature = dict(zip(used, found, strict=True))
            return [float(by_feature.get(index, 0.0)) for index in range(features.shape[1])]
        del used[int(found.argmin())]


def bound_seconds(jobs: Sequence[Job], slots: int, step_tokens: int, coefficients: Sequence[float]) -> float:
    """The same tokens in as few steps as slots and step allow, each token computed and each key read once per step that needs it."""
    fixed, per_token, per_row, per_key = coefficients
    tokens = sum(job.prompt_tokens + job.output_tokens - 1 for job in jobs)
    chunks = sum(-(-job.prompt_tokens // step_tokens) + job.output_tokens - 1 for job in jobs)
    keys = sum(
        sum(range(job.prompt_tokens + 1, job.prompt_tokens + job.output_tokens)) + job.prompt_tokens for job in jobs
    )  # a prompt's own attention is part of what its tokens cost
    steps = max(-(-chunks // slots), -(-tokens // step_tokens))
    return steps * fixed + tokens * per_token + chunks * per_row + keys * per_key


def poisson(jobs: Sequence[Job], rate: float, rng: random.Random) -> list[Job]:
    """The jobs, one after another at random."""
    at, found = 0.0, []
    for job in jobs:
        at += rng.expovariate(rate)
        found.append(replace(job, at=at))
    return found


def _of_way(name: str, jobs: Sequence[Job]) -> Sequence[Job]:
    """Where one batch follows another, fewer tell as much; without, the last requests' emptying of the slots must not count for much."""
    return jobs[: len(jobs) // {"static_padded": 12, "static_dropped": 3}.get(name, 1)]


def report(trace: str, jobs: Sequence[Job], bench: Bench, rounds: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Every figure of one trace's lengths."""
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    for round_ in range(rounds):
        for name, batching in WAYS.items():
            run = bench.run(_of_way(name, jobs), batching)
            runs[name].append(run)
            say(f"{trace} round {round_ + 1}/{rounds}: {name}: {run.num_jobs / run.seconds:.2f} requests/s")
    rates = {name: statistics.median(run.num_jobs / run.seconds for run in found) for name, found in runs.items()}
    for name, found in runs.items():
        yield line(f"paper_{trace}_{name}", rates[name], "requests/s")
        yield line(f"paper_{trace}_{name}_busy_share", statistics.median(run.busy_share for run in found), "of the time")
        yield line(
            f"paper_{trace}_{name}_cost",
            statistics.median(1e6 * run.seconds / run.num_tokens for run in found),
            "device-seconds per 1M output tokens",
        )
    for name in ("static_padded", "static_dropped"):
        yield line(f"paper_{trace}_over_{name}", rates["continuous"] / rates[name], "x")
    yield line(f"paper_{trace}_spread_bound", spread_bound([job.output_tokens for job in jobs], bench.slots, rng), "x")
    yield from _saturation(trace, jobs, bench, runs["continuous"], rates["continuous"])
    rate = 0.8 * rates["static_dropped"]
    for name, batching in WAYS.items():
        run = bench.run(poisson(_of_way(name, jobs), rate, rng), batching)
        say(f"{trace} at {rate:.2f} requests/s: {name}")
        yield line(f"paper_{trace}_{name}_ttft_p50", 1e3 * percentile(run.ttft, 0.5), "ms")
        yield line(f"paper_{trace}_{name}_ttft_p99", 1e3 * percentile(run.ttft, 0.99), "ms")
    yield from _busy(trace, jobs, bench, rates["continuous"], rng)


def _saturation(trace: str, jobs: Sequence[Job], bench: Bench, runs: Sequence[Run], rate: float) -> Iterator[dict[str, object]]:
    """How near continuous batching comes to what its own steps allow."""
    bound = len(jobs) / bound_seconds(jobs, bench.slots, MAX_STEP_TOKENS, fitted([run.log for run in runs]))
    yield line(f"paper_{trace}_bound", bound, "requests/s")
    yield line(f"paper_bound_share_{trace}", rate / bound, "of the bound")
    occupied = [slots for run in runs for slots in run.occupied]
    yield line(f"slot_occupancy_{trace}", statistics.mean(occupied) / bench.slots, "of the slots")
    full = [row[0] >= MAX_STEP_TOKENS for run in runs for row in run.log.rows]
    yield line(f"paper_{trace}_full_steps", float(statistics.mean(full)), "of the steps had no token left")
    length = statistics.mean(job.prompt_tokens + job.output_tokens for job in jobs)
    num_blocks = bench.slots * MAX_MODEL_LEN // BLOCK_SIZE
    resident = resident_sequences(num_blocks=num_blocks, block_size=BLOCK_SIZE, mean_length=length, max_sequences=bench.slots)
    steps_per_s = statistics.mean(len(run.log.rows) / run.seconds for run in runs)
    mean_output = statistics.mean(job.output_tokens for job in jobs)
    yield line(f"Theta_max_{trace}", theta_max(resident, steps_per_s, mean_output), "requests/s")


def _busy(trace: str, jobs: Sequence[Job], bench: Bench, rate: float, rng: random.Random) -> Iterator[dict[str, object]]:
    """Realtime among batch requests, at arrivals that keep the device busy for nine tenths of the time."""
    mixed = [replace(job, latency_class=REALTIME if rng.random() < 0.25 else BATCH) for job in jobs]
    run = bench.run(poisson(mixed, BUSY_TARGET * rate, rng), continuous)
    yield line(f"step_mape_{trace}", run.log.step_error, "of the measured seconds")
    yield line(f"paper_{trace}_busy90_busy_share", run.busy_share, "of the time")
    yield line(f"paper_{trace}_busy90_realtime_ttft_p50", 1e3 * percentile(run.realtime_ttft, 0.5), "ms")
    yield line(f"paper_{trace}_busy90_realtime_ttft_p99", 1e3 * percentile(run.realtime_ttft, 0.99), "ms")
    for name, latency_class in (("realtime", REALTIME), ("batch", BATCH)):
        sizes = [float(counts[latency_class]) for counts in run.log.classes if counts[latency_class]]
        yield line(f"paper_{trace}_busy90_{name}_batch_p50", percentile(sizes, 0.5), "sequences")
        yield line(f"paper_{trace}_busy90_{name}_batch_p95", percentile(sizes, 0.95), "sequences")


def promised(traces: Sequence[str], values: Mapping[str, float]) -> Iterator[dict[str, object]]:
    """The figures that have a target, over the traces: the worst. Slots count where most steps have tokens left; null where none do."""
    yield line("paper_bound_share", min(values[f"paper_bound_share_{trace}"] for trace in traces), "of the bound", 0.95)
    occupancies = [values[f"slot_occupancy_{trace}"] for trace in traces if values[f"paper_{trace}_full_steps"] < 0.5]
    yield line("slot_occupancy", min(occupancies, default=None), "of the slots", 0.97)
    yield line("step_mape", max(values[f"step_mape_{trace}"] for trace in traces), "of the measured seconds", 0.10, at_most=True)


def spread_bound(outputs: Sequence[int], slots: int, rng: random.Random) -> float:
    """What the spread of output lengths alone leaves to win over static batching: the mean longest of a batch over the mean (SPEC 9)."""
    longest = [max(rng.sample(list(outputs), slots)) for _ in range(200)]
    return statistics.mean(longest) / statistics.mean(outputs)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Reads the arguments, runs, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("FOREBAY_TRACES", "../shared/traces")), help="of the CSV files")
    parser.add_argument("--requests", type=int, default=1200, help="of the continuous runs; the others have fewer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-scale", type=float, default=0.1)
    parser.add_argument("--output-scale", type=float, default=0.25)
    arguments = parser.parse_args()
    values: dict[str, float] = {}
    bench = Bench(default().path, arguments.slots, len(os.sched_getaffinity(0)))
    for trace in arguments.traces:
        rng = random.Random(f"paper {trace}")
        pairs = scaled_pairs(arguments.folder / TRACES[trace], arguments.prompt_scale, arguments.output_scale)
        fitting = [pair for pair in pairs if sum(pair) <= MAX_MODEL_LEN]
        jobs = [Job(0.0, *pair) for pair in rng.sample(fitting, arguments.requests)]
        for figure in report(trace, jobs, bench, arguments.rounds, rng):
            if isinstance(value := figure["value"], float):
                values[str(figure["figure"])] = value
            show(figure)
    for figure in promised(arguments.traces, values):
        show(figure)


if __name__ == "__main__":
    main()
