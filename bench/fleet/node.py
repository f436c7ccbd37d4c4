"""A worker's engine on a virtual clock: chunked prefill and continuous batching as the batcher does them, on the real block pool.

Where nothing but decoding goes on, all steps until the next event are one event. It is told what to run and decides nothing about where.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.fleet.devices import StepLaw, Thermals
from bench.fleet.trace import BLOCK_TOKENS
from services.scheduler.policy.node import NodeState, StepCost
from services.worker.engine.block_pool import BlockPool
from services.worker.engine.step_time import Load, StepTime

LEARN_ALL, LEARN_EACH = 32, 8
"""The step time is fitted to so many steps, then to each so many'th."""
FOREVER = math.inf


@dataclass(eq=False, slots=True)
class Job:
    """One request on a node. Times are seconds of the virtual clock."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    keys: Sequence[bytes]
    arrived: float
    num_computed: int = 0
    num_found: int = 0
    table: list[int] = field(default_factory=list)
    first_at: float = 0.0
    ended_at: float = 0.0
    model: str = ""


@dataclass(frozen=True)
class Engine:
    """How a worker's engine is set."""

    num_blocks: int
    block_tokens: int = BLOCK_TOKENS
    max_sequences: int = 64
    max_waiting: int = 2
    max_step_tokens: int = 2048


class Node:
    """`until` is when its step, or run of steps, ends; then `turn` is to be called."""

    def __init__(self, name: str, model: str, law: StepLaw, engine: Engine, thermals: Thermals) -> None:
        self.name = name
        self.model = model
        self.engine = engine
        self.pool = BlockPool(engine.num_blocks)
        self.thermals = thermals
        self.step_time = StepTime()
        self.served = {model: engine.num_blocks}
        self.until = FOREVER
        self._paused: tuple[float, float] | None = None  # since when, and how long the run had still to go
        self.jobs: dict[str, Job] = {}
        self.num_hit_tokens = 0
        self._law = law
        self._waiting: deque[Job] = deque()
        self._prompts: list[Job] = []  # running, not yet decoding
        self._chunks: list[tuple[Job, int]] = []  # of the step under way
        self._ends: list[tuple[int, int, Job]] = []  # heap: number of the step in which it ends, a tie-breaker, the job
        self._num_steps = self._num_keys = self._num_jobs = self._num_recorded = 0
        self._run = (0.0, 0, 0.0, 0.0)  # start, steps, seconds of the first, what each next one takes more
        self._busy = self._looked_at = self._noted_at = 0.0

    def warm_up(self) -> None:
        """It has run before the trace begins: its step time is known."""
        for number in range(1, LEARN_ALL + 1):
            decodes, chunk = number % 16, self.engine.max_step_tokens // (1 + number % 4) if number % 3 else 0
            load = Load(decodes + chunk, decodes + 1, 2000 * decodes + 2 * chunk)
            pairs = 2000.0 * decodes + 1.5 * chunk * chunk
            self.step_time.record(load, self._law.seconds(load.num_tokens, load.num_rows, load.num_keys, pairs))

    # --- what happens to it

    def take(self, job: Job, now: float) -> None:
        """A request has come. A run of decoding steps ends with the step under way."""
        self.jobs[job.request_id] = job
        self._waiting.append(job)
        if self._paused is not None:
            return
        if self.until == FOREVER:
            self._begin(now)
        elif not self._chunks:
            self._cut(now)

    def turn(self, now: float) -> tuple[list[Job], list[Job]]:
        """Its steps have ended. (jobs that have their first token, jobs that have ended)"""
        start, num_steps, seconds, more = self._run
        self._busy += now - max(start, self._looked_at)
        self._learn(num_steps, seconds + more * (num_steps - 1) / 2)
        self._num_steps += num_steps
        self._num_keys += len(self._ends) * num_steps
        firsts = self._commit_chunks(now)
        ended = []
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, _, job = heapq.heappop(self._ends)
            ended.append(job)
            job.ended_at = now
            self._num_keys -= job.num_prompt_tokens + job.num_output_tokens
            self.pool.free(job.table)
            del self.jobs[job.request_id]
        self._begin(now)
        return firsts, ended

    def pause(self, now: float) -> None:
        """Its weights have gone: what it does goes on where it was when they are back."""
        self._paused = now, self.until - now
        self.until = FOREVER

    def resume(self, now: float) -> None:
        """They are."""
        if self._paused is None:
            return
        (since, left), self._paused = self._paused, None
        start, *run = self._run
        self._run = (start + now - since, *run)  # type: ignore[assignment]  # three more
        self.until = now + left
        if self.until == FOREVER and self._waiting:
            self._begin(now)

    @property
    def slowed_seconds(self) -> float:
        """In which it was too hot."""
        return self.thermals.slowed_seconds

    def state(self, now: float) -> tuple[NodeState, int]:
        """(what a heartbeat tells, tokens of prompts still to compute)"""
        elapsed = now - self._looked_at
        busy = self._busy + (0.0 if self.until == FOREVER else now - max(self._run[0], self._looked_at))
        share = min(1.0, busy / elapsed) if elapsed > 0 else 0.0
        self.thermals.pass_time(elapsed, share)
        self._busy, self._looked_at = 0.0, now
        line = self.step_time.line
        lacking = sum(job.num_prompt_tokens - job.num_computed for group in (self._prompts, self._waiting) for job in group)
        return NodeState(
            None if line is None else StepCost(*line), self.engine.max_step_tokens, share,
            1 - self.pool.num_used / self.engine.num_blocks, len(self._waiting),
            self.thermals.celsius, self.thermals.celsius_per_second, self.thermals.device.slowdown_celsius,
        ), lacking  # fmt: skip

    @property
    def num_running(self) -> int:
        """Sequences in its steps."""
        return len(self._prompts) + len(self._ends)

    @property
    def num_context_tokens(self) -> int:
        """Of those that decode."""
        return self._num_keys

    # --- steps

    def _begin(self, now: float) -> None:
        while self._waiting and self.num_running < self.engine.max_sequences and self._start(self._waiting[0]):
            self._prompts.append(self._waiting.popleft())
        self._chunks = []
        if self._prompts:
            seconds = self._chunk_step()
            self._run = now, 1, seconds, 0.0
        elif self._ends:
            num = len(self._ends)
            seconds = self._law.seconds(num, num, self._num_keys, self._num_keys) / self.thermals.speed
            more = num * (self._law.key + self._law.pair) / self.thermals.speed
            self._run = now, self._ends[0][0] - self._num_steps, seconds, more
        else:
            self.until = FOREVER
            return
        self.until = now + self._run_seconds(self._run[1])

    def _run_seconds(self, num_steps: int) -> float:
        _, _, seconds, more = self._run
        return num_steps * seconds + more * num_steps * (num_steps - 1) / 2

    def _cut(self, now: float) -> None:
        """The run ends with the step that is under way."""
        start, num_steps, seconds, more = self._run
        elapsed = now - start
        # The number of steps that take at least so long: the positive root of their sum.
        half = seconds - more / 2
        steps = elapsed / seconds if more <= 0 else (math.sqrt(half * half + 2 * more * elapsed) - half) / more
        self._run = start, min(num_steps, max(1, math.ceil(steps - 1e-9))), seconds, more
        self.until = max(now, start + self._run_seconds(self._run[1]))

    def _start(self, job: Job) -> bool:
        """Blocks for all that it will have, found ones first."""
        hits = self.pool.lookup(job.keys)
        total = -(-(job.num_prompt_tokens + job.num_output_tokens) // self.engine.block_tokens)
        if total - len(hits) + self.pool.num_unreferenced(hits) > self.pool.num_available:
            return False
        self.pool.touch(hits)
        job.table = [*hits, *self.pool.allocate(total - len(hits))]
        job.num_computed = job.num_found = len(hits) * self.engine.block_tokens
        self.num_hit_tokens += job.num_found
        return True

    def _chunk_step(self) -> float:
        """Seconds of a step with a token for each that decodes, and prompts in order with what is left."""
        num_decodes = len(self._ends)
        left, rows, keys, pairs = self.engine.max_step_tokens - num_decodes, num_decodes, self._num_keys, float(self._num_keys)
        for job in self._prompts:
            length = min(left, job.num_prompt_tokens - job.num_computed)
            if length <= 0:
                break
            left -= length
            end = job.num_computed + length
            rows += end == job.num_prompt_tokens
            keys += end
            pairs += length * (job.num_computed + length / 2)
            self._chunks.append((job, length))
        tokens = self.engine.max_step_tokens - left
        self._load = Load(tokens, rows, keys)
        return self._law.seconds(tokens, rows, keys, pairs) / self.thermals.speed

    def _commit_chunks(self, now: float) -> list[Job]:
        firsts = []
        for job, length in self._chunks:
            start = job.num_computed // self.engine.block_tokens
            job.num_computed += length
            for index in range(start, min(len(job.keys), job.num_computed // self.engine.block_tokens)):
                self.pool.register(job.table[index], job.keys[index])
            if job.num_computed == job.num_prompt_tokens:
                job.first_at = now
                firsts.append(job)
                self._prompts.remove(job)
                self._num_jobs += 1
                heapq.heappush(self._ends, (self._num_steps + job.num_output_tokens - 1, self._num_jobs, job))
                self._num_keys += job.num_prompt_tokens + 1
        return firsts

    def _learn(self, num_steps: int, seconds: float) -> None:
        """As the engine does: from steps that were, in their middle where they are told together."""
        self._num_recorded += 1
        if self._num_recorded > LEARN_ALL and self._num_recorded % LEARN_EACH:
            return
        num = len(self._ends)
        load = self._load if self._chunks else Load(num, num, self._num_keys + num * (num_steps - 1) // 2)
        self.step_time.record(load, seconds)
