"""Jobs on one engine, batched in one way or another, and what each step of it took."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.policy.classes import DEFAULT_CLASSES
from services.worker.engine.batch import Batch, Runner, SpanResult
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, SamplingParams
from services.worker.engine.step_time import StepTime, load_of

MAX_MODEL_LEN = 1024
MAX_STEP_TOKENS = 256
BLOCK_SIZE = EngineConfig.block_size
REALTIME, BATCH = 1, 3


@dataclass(frozen=True)
class Job:
    """One request, due at `at` seconds from the start."""

    at: float
    prompt_tokens: int
    output_tokens: int
    latency_class: int = BATCH


@dataclass
class StepLog:
    """A runner that notes each step: tokens, sequences, keys read, seconds, sequences by class; and how well the step was foretold."""

    runner: Runner
    step_time: StepTime
    rows: list[tuple[int, int, int, float]] = field(default_factory=list)
    classes: list[Counter[int]] = field(default_factory=list)
    foretold: list[float] = field(default_factory=list)  # seconds, before the step was learnt from; 0: nobody could
    measured: list[float] = field(default_factory=list)  # of the engine's whole step

    def copy(self, batch: Batch) -> None:
        """See Runner."""
        self.runner.copy(batch)

    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner."""
        self.foretold.append(self.step_time.seconds(load_of(batch.spans)) if self.step_time.known else 0.0)
        started = time.perf_counter()
        results = self.runner.execute(batch)
        seconds = time.perf_counter() - started
        self.rows.append((batch.num_tokens, len(batch.spans), sum(span.end for span in batch.spans), seconds))
        self.classes.append(Counter(span.sequence.group.request.latency_class for span in batch.spans))
        return results

    @property
    def step_error(self) -> float:
        """Mean of |foretold - measured| / measured."""
        pairs = [pair for pair in zip(self.foretold, self.measured, strict=True) if pair[0]]
        return statistics.mean(abs(foretold / measured - 1) for foretold, measured in pairs)


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
            max_step_tokens=MAX_STEP_TOKENS,
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
        engine, log = self._engine, StepLog(self._runner, self._engine.batcher.step_time)
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
                live |= self._begin(group)
                for job in group:
                    due.remove(job)
            if not engine.has_work:
                time.sleep(max(0.0, min(0.001, waiting[-1].at - now)) if waiting else 0)
                continue
            backlog = bool(due or engine.batcher.queue.waiting)
            before = time.perf_counter() - started
            outputs = engine.step(started + before)  # its clock goes on from run to run
            if backlog:
                occupied.append(len(engine.batcher.queue.running) + sum(news.finish_reason is not None for news in outputs))
            now = time.perf_counter() - started
            log.measured.append(now - before)
            for news in outputs:
                if news.token_ids and news.request_id not in first:
                    first[news.request_id] = now - live[news.request_id].at
        engine.check_integrity()
        engine.runner = self._runner
        seconds = time.perf_counter() - started
        realtime = [ttft for request_id, ttft in first.items() if live[request_id].latency_class == REALTIME]
        return Run(seconds, len(jobs), sum(job.output_tokens for job in jobs), list(first.values()), realtime, log, occupied)

    def _begin(self, group: Sequence[Job]) -> dict[str, Job]:
        """Hands them to the engine, each as long as the longest: by request id."""
        prompt, output = max(job.prompt_tokens for job in group), max(job.output_tokens for job in group)
        return {self._add(prompt, output, job.latency_class): job for job in group}

    def _add(self, prompt_tokens: int, output_tokens: int, latency_class: int) -> str:
        self._num_requests += 1
        rng = random.Random(self._num_requests)
        prompt = [rng.randrange(100, self._engine.vocab_size - 100) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        promised = DEFAULT_CLASSES[latency_class]
        request = EngineRequest(
            str(self._num_requests),
            prompt,
            sampling,
            latency_class=latency_class,
            ttft_target_seconds=promised.ttft_target_ms / 1000,
            tpot_target_seconds=promised.tpot_target_ms / 1000,
        )
        self._engine.add(request)
        return request.request_id
