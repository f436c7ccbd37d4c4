"""The paper's table on one engine: static batching, padded and with finished rows dropped, beside continuous batching.

Lengths are those of the Azure traces, scaled to fit. Saturated runs give throughput, busy share, slots and cost; runs with Poisson
arrivals, at a rate that static batching can just serve, give times to first token. Beside them stands the bound: the same tokens at the
fitted step times with every slot taken. Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.figure import line
from bench.lengths import scaled_pairs
from bench.serving import percentile
from services.cli.models import default
from services.worker.engine.batch import Batch, Runner, SpanResult
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, SamplingParams

TRACES = {"conv": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
MAX_MODEL_LEN = 1024
BLOCK_SIZE = EngineConfig.block_size
REALTIME, BATCH = 1, 3
BUSY_TARGET = 0.9  # offered load of the run that realtime's p99 is taken from


@dataclass(frozen=True)
class Job:
    """One request, due at `at` seconds from the start."""

    at: float
    prompt_tokens: int
    output_tokens: int
    latency_class: int = BATCH


@dataclass
class StepLog:
    """A runner that notes each step: tokens, sequences, keys read, seconds, sequences by class."""

    runner: Runner
    rows: list[tuple[int, int, int, float]] = field(default_factory=list)
    classes: list[Counter[int]] = field(default_factory=list)

    def copy(self, batch: Batch) -> None:
        """See Runner."""
        self.runner.copy(batch)

    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner."""
        started = time.perf_counter()
        results = self.runner.execute(batch)
        seconds = time.perf_counter() - started
        self.rows.append((batch.num_tokens, len(batch.spans), sum(span.end for span in batch.spans), seconds))
        self.classes.append(Counter(span.sequence.group.request.latency_class for span in batch.spans))
        return results


@dataclass(frozen=True)
class Run:
    """What one way of batching made of some jobs."""

    seconds: float
    num_jobs: int
    num_tokens: int  # output, asked for
    ttft: list[float]
    realtime_ttft: list[float]
    log: StepLog
    occupied: list[int]  # slots in use by step, while requests waited

    @property
    def busy_share(self) -> float:
        """Of the time: the device computed."""
        return sum(row[3] for row in self.log.rows) / self.seconds


Batching = Callable[[Engine, list[Job]], list[list[Job]]]
"""Which due jobs start now, in groups that are padded alike."""


def continuous(_: Engine, due: list[Job]) -> list[list[Job]]:
    """Whoever is due; the engine has the slots."""
    return [[job] for job in due]


def static(engine: Engine, due: list[Job]) -> list[list[Job]]:
    """A batch when the last has ended whole, each row until its own end."""
    return [] if engine.has_work else [[job] for job in due[: engine.config.max_sequences]]


def padded(engine: Engine, due: list[Job]) -> list[list[Job]]:
    """The same, every row as long as the longest."""
    return [] if engine.has_work or not due else [due[: engine.config.max_sequences]]


WAYS: dict[str, Batching] = {"static_padded": padded, "static_dropped": static, "continuous": continuous}


class Bench:
    """One engine that runs jobs in one way after another."""

    def __init__(self, path: Path, slots: int, num_threads: int) -> None:
        config = EngineConfig(
            num_blocks=slots * MAX_MODEL_LEN // BLOCK_SIZE,
            max_sequences=slots,
            max_step_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            level="int4",
            num_threads=num_threads,
            prefix_cache=False,
        )
        self._engine = Engine.from_path(path, config)
        self._runner = self._engine.runner
        self._num_requests = 0
        self.slots = slots

    def run(self, jobs: Sequence[Job], batching: Batching) -> Run:
        """All jobs to their end."""
        engine, log = self._engine, StepLog(self._runner)
        engine.runner = log
        waiting = sorted(jobs, key=lambda job: job.at, reverse=True)
        due: list[Job] = []
        started = time.perf_counter()
        first: dict[str, float] = {}
        live: dict[str, Job] = {}
        occupied: list[int] = []
        while waiting or due or engine.has_work:
            now = time.perf_counter() - started
            while waiting and waiting[-1].at <= now:
                due.append(waiting.pop())
            for group in batching(engine, due):
                prompt, output = max(job.prompt_tokens for job in group), max(job.output_tokens for job in group)
                for job in group:
                    due.remove(job)
                    live[self._add(prompt, output, job.latency_class)] = job
            if not engine.has_work:
                time.sleep(max(0.0, min(0.001, waiting[-1].at - now)) if waiting else 0)
                continue
            backlog = bool(due or engine.batcher.queue.waiting)
            outputs = engine.step(now)
            if backlog:
                occupied.append(log.rows[-1][1])
            now = time.perf_counter() - started
            for news in outputs:
                if news.token_ids and news.request_id not in first:
                    first[news.request_id] = now - live[news.request_id].at
        engine.check_integrity()
        engine.runner = self._runner
        seconds = time.perf_counter() - started
        realtime = [ttft for request_id, ttft in first.items() if live[request_id].latency_class == REALTIME]
        return Run(seconds, len(jobs), sum(job.output_tokens for job in jobs), list(first.values()), realtime, log, occupied)

    def _add(self, prompt_tokens: int, output_tokens: int, latency_class: int) -> str:
        self._num_requests += 1
        rng = random.Random(self._num_requests)
        prompt = [rng.randrange(100, self._engine.vocab_size - 100) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        request = EngineRequest(str(self._num_requests), prompt, sampling, latency_class=latency_class)
        self._engine.add(request)
        return request.request_id


def fitted(logs: Sequence[StepLog]) -> list[float]:
    """Seconds of a step, per token, per sequence and per key, by least squares of relative errors."""
    rows = np.array([row for log in logs for row in log.rows], dtype=np.float64)
    features = np.column_stack([np.ones(len(rows)), rows[:, 0], rows[:, 1], rows[:, 2]]) / rows[:, 3:4]
    return [max(0.0, float(value)) for value in np.linalg.lstsq(features, np.ones(len(rows)), rcond=None)[0]]


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


def report(trace: str, jobs: Sequence[Job], bench: Bench, rounds: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Every figure of one trace's lengths."""
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    for round_ in range(rounds):
        for name, batching in WAYS.items():
            run = bench.run(jobs, batching)
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
        run = bench.run(poisson(jobs, rate, rng), batching)
        say(f"{trace} at {rate:.2f} requests/s: {name}")
        yield line(f"paper_{trace}_{name}_ttft_p50", 1e3 * percentile(run.ttft, 0.5), "ms")
        yield line(f"paper_{trace}_{name}_ttft_p99", 1e3 * percentile(run.ttft, 0.99), "ms")
    yield from _busy(trace, jobs, bench, rates["continuous"], rng)


def _saturation(trace: str, jobs: Sequence[Job], bench: Bench, runs: Sequence[Run], rate: float) -> Iterator[dict[str, object]]:
    """How near continuous batching comes to what its own steps allow."""
    bound = len(jobs) / bound_seconds(jobs, bench.slots, 256, fitted([run.log for run in runs]))
    yield line(f"paper_{trace}_bound", bound, "requests/s")
    yield line(f"paper_bound_share_{trace}", rate / bound, "of the bound", 0.95)
    occupied = [slots for run in runs for slots in run.occupied]
    yield line(f"slot_occupancy_{trace}", statistics.mean(occupied) / bench.slots, "of the slots", 0.97)
    length = statistics.mean(job.prompt_tokens + job.output_tokens for job in jobs)
    resident = min(bench.slots, bench.slots * MAX_MODEL_LEN / length)
    steps_per_s = statistics.mean(len(run.log.rows) / run.seconds for run in runs)
    yield line(f"theta_max_{trace}", resident * steps_per_s / statistics.mean(job.output_tokens for job in jobs), "requests/s")


def _busy(trace: str, jobs: Sequence[Job], bench: Bench, rate: float, rng: random.Random) -> Iterator[dict[str, object]]:
    """Realtime among batch requests, at arrivals that keep the device busy for nine tenths of the time."""
    mixed = [replace(job, latency_class=REALTIME if rng.random() < 0.25 else BATCH) for job in jobs]
    run = bench.run(poisson(mixed, BUSY_TARGET * rate, rng), continuous)
    yield line(f"paper_{trace}_busy90_busy_share", run.busy_share, "of the time")
    yield line(f"paper_{trace}_busy90_realtime_ttft_p50", 1e3 * percentile(run.realtime_ttft, 0.5), "ms")
    yield line(f"paper_{trace}_busy90_realtime_ttft_p99", 1e3 * percentile(run.realtime_ttft, 0.99), "ms")
    for name, latency_class in (("realtime", REALTIME), ("batch", BATCH)):
        sizes = [float(counts[latency_class]) for counts in run.log.classes if counts[latency_class]]
        yield line(f"paper_{trace}_busy90_{name}_batch_p50", percentile(sizes, 0.5), "sequences")
        yield line(f"paper_{trace}_busy90_{name}_batch_p95", percentile(sizes, 0.95), "sequences")


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
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-scale", type=float, default=0.1)
    parser.add_argument("--output-scale", type=float, default=0.25)
    arguments = parser.parse_args()
    bench = Bench(default().path, arguments.slots, len(os.sched_getaffinity(0)))
    for trace in arguments.traces:
        rng = random.Random(f"paper {trace}")
        pairs = scaled_pairs(arguments.folder / TRACES[trace], arguments.prompt_scale, arguments.output_scale)
        fitting = [pair for pair in pairs if sum(pair) <= MAX_MODEL_LEN]
        jobs = [Job(0.0, *pair) for pair in rng.sample(fitting, arguments.requests)]
        for figure in report(trace, jobs, bench, arguments.rounds, rng):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
