"""The engine: token ids in, token ids out. One thread calls it; it knows no text and no network, and its clock only measures."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.worker.engine import backend
from services.worker.engine.admission import Cause, Want
from services.worker.engine.batch import Batch, Runner, SpanResult
from services.worker.engine.batcher import Batcher
from services.worker.engine.block_pool import SharedPool
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import (
    LATENCY_CLASSES,
    EngineRequest,
    FinishReason,
    InvalidRequest,
    PositionLogprobs,
    RequestTooLarge,
    SamplingParams,
    SequenceError,
    TokenLogprob,
    TokenOutput,
    check,
)
from services.worker.engine.speculation.model_drafter import ModelDrafter
from services.worker.engine.speculation.speculator import SpeculationCounters, Speculator
from services.worker.engine.speculation.suffix_drafter import SuffixDrafter
from services.worker.engine.step_time import Load

__all__ = [
    "Engine",
    "EngineRequest",
    "EngineStats",
    "FinishReason",
    "InvalidRequest",
    "PositionLogprobs",
    "RequestTooLarge",
    "SamplingParams",
    "SequenceError",
    "TokenLogprob",
    "TokenOutput",
]


@dataclass(frozen=True)
class EngineStats:
    """Gauges of now, and counters since the start. used + cached + free = all blocks."""

    num_running: int  # sequences
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # unreferenced, found again by their keys, given away when needed
    num_free_blocks: int
    num_prefix_query_tokens: int  # prompt tokens looked up in the prefix cache
    num_prefix_hit_tokens: int
    num_host_blocks: int  # slots of host memory for what the cache evicts and what is swapped
    num_held_host_blocks: int
    num_host_query_tokens: int  # prompt tokens that the cache didn't have and the host was asked for
    num_host_hit_tokens: int
    num_copied_out_blocks: int  # to the host
    num_copied_in_blocks: int
    num_computed_tokens: int  # prompt and output, recomputation included
    num_generated_tokens: int
    num_class_preemptions: int  # of a sequence, in favour of a more urgent class
    num_capacity_preemptions: int  # so that others of its class could grow
    num_swaps: int  # preemptions after which nothing is computed again
    num_swapped_blocks: int
    num_swapped_tokens: int
    step_time_error: float  # mean relative error of the latest steps' foretold times
    step_time: tuple[float, float, float, float] | None  # seconds fixed, per token, row and key; None while too few steps were seen
    num_prefill_tokens: int  # to be computed before the next tokens of those that don't decode
    num_drafts: int  # spans with a draft
    num_draft_tokens: int
    num_accepted_tokens: int
    num_spans_by_accepted: tuple[int, ...]  # spans with a draft by how many of it were accepted, from 0

    @property
    def num_preemptions(self) -> int:
        """For whatever cause."""
        return self.num_class_preemptions + self.num_capacity_preemptions


class Engine:
    """A model, its cache and the requests on it.

    `max_model_len` bounds prompt plus output of a choice; None: what the cache holds. `speculator` decides on drafts; None: as the
    configuration says, with lookups in the sequence's own past. `clock`, in seconds, times the steps for it. `pool` is its part of a pool
    that several engines share, in which each block is a page; None: its blocks are its own.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int | None = None,
        model_version: str = "",
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pool: SharedPool | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len or config.max_model_len or config.num_blocks * config.block_size
        self.model_version = model_version
        self.runner = runner
        self.is_delayed = False  # set before a step that will wait for weights: how long it takes teaches nothing
        speculator = speculator or (Speculator(SuffixDrafter(), config.speculation) if config.speculation else None)
        self._clock = clock
        ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]  # some configs name tokens that the weights lack
        weights = f"{model_version}@{config.level}"  # what keys and values were computed with
        self.batcher = Batcher(config, self.max_model_len, ends, weights, config.cache_format, speculator, pool)
        if pool is not None:
            pool.on_lost = self._save

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        shared: tuple[SharedPool, torch.Tensor] | None = None,
    ) -> "Engine":
        """Loads a GGUF file or a Hugging Face folder. progress(bytes done, bytes in all). ModelFileError for a bad file.

        `shared`: its part of a pool, and all pages of that, uint8 [num_pages, bytes of a page].
        """
        pool, pages = shared or (None, None)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = backend.load(Path(path), config, progress, pages)
        model, drafting = loaded.config, loaded.drafting
        return cls(
            loaded.runner,
            config,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=min(config.max_model_len or model.max_position, model.max_position),
            model_version=loaded.version,
            speculator=None if drafting is None else Speculator(ModelDrafter(drafting, time.perf_counter), config.speculation),
            pool=pool,
        )

    @property
    def speculator(self) -> Speculator | None:
        """None: no drafts."""
        return self.batcher.speculator

    @property
    def has_work(self) -> bool:
        """True while a step would do or say something."""
        return self.batcher.has_work

    @property
    def most_urgent_class(self) -> int:
        """Of the live requests; batch where there is none."""
        return min((group.request.latency_class for group in self.batcher.queue.requests.values()), default=LATENCY_CLASSES[-1])

    @property
    def num_tokens(self) -> tuple[int, int]:
        """(computed, generated) since the start; recomputed ones count again."""
        counters = self.batcher.counters
        return counters.computed_tokens, counters.generated_tokens

    def add(self, request: EngineRequest) -> None:
        """Queues a request. InvalidRequest for a value that can't be computed with, RequestTooLarge for what can never fit."""
        check(request, self.vocab_size)
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        self.batcher.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request in any state and frees its blocks at once; nothing more is said of it. Idempotent."""
        self.batcher.abort(request_id)

    def step(self, now: float) -> list[TokenOutput]:
        """Computes one batch: what every running choice needs next, and new ones as far as there is room. `now` in seconds, any origin.

        One output per choice that has news. An exception is a fault of the whole engine: what a request alone is to blame for ends that
        request with FinishReason.ERROR instead.
        """
        began = started = self._clock()
        batch = self.batcher.schedule(now)
        if batch.num_copies:
            started += self._copy(batch)
        if self.speculator is not None:
            before = self._clock()
            batch = self.speculator.draft(batch)
            started += self._clock() - before
        batch, results = self._execute(batch)
        outputs = self.batcher.commit(batch, results, now + self._clock() - began)
        if batch.spans and not self.is_delayed:
            self.batcher.observe(batch.spans, self._clock() - started)
        return outputs

    def _copy(self, batch: Batch) -> float:
        """The seconds that it took."""
        started = self._clock()
        self.runner.copy(batch)
        seconds = self._clock() - started
        self.batcher.costs.copy.record(batch.num_copies, seconds)
        return seconds

    def _execute(self, batch: Batch) -> tuple[Batch, list[SpanResult]]:
        """Runs the batch, without the request that makes the runner raise a SequenceError."""
        while batch.spans:
            started = self._clock()
            try:
                results = self.runner.execute(batch)
                if not self.is_delayed:
                    self.batcher.costs.record_step([span.length for span in batch.spans], self._clock() - started)
                return batch, results
            except SequenceError as error:
                self.batcher.fail(error)
                batch = batch.without(error.request_id)
        return batch, []

    # --- where engines share a pool, see sharing.claims

    def want(self, now: float) -> Want | None:
        """The blocks that its running sequences, or its first waiting one, lack; None: it has another reason to wait, or there is none."""
        return self.batcher.admission.want(now)

    @property
    def num_growing(self) -> int:
        """Running sequences that may need a further block."""
        return self.batcher.admission.num_growing

    def num_yieldable(self, latency_class: int, now: float) -> int:
        """Blocks that `give_way` could free, at most."""
        return self.batcher.admission.num_yieldable(latency_class, now)

    def give_way(self, num_blocks: int, latency_class: int, cause: Cause, now: float) -> int:
        """Preempts sequences of classes below until so many blocks are free; how many came free. What they held may be overwritten."""
        num_freed = self.batcher.admission.give_way(num_blocks, latency_class, cause, now)
        self._save()
        return num_freed

    def _save(self) -> None:
        """Copies to the host at once what the next step would, as another engine is going to write those blocks before it."""
        tables = self.batcher.tables
        assert not tables.host.copies_in, "in the middle of a step"
        if tables.host.copies_out:
            self._copy(Batch((), tuple(tables.host.copies_out)))
            tables.settle()

    def progress(self) -> list[tuple[str, int, int]]:
        """(request id, output tokens so far, blocks held) of every live request, over its choices; a shared block counts once."""
        return [
            (request_id, sum(s.num_output_tokens for s in group.sequences), len({b for s in group.sequences for b in s.block_table}))
            for request_id, group in self.batcher.queue.requests.items()
        ]

    def full_step_seconds(self) -> float:
        """What a step as full as one may be should take, by the steps so far; 0 while too few have been."""
        step_time, pool = self.batcher.step_time, self.batcher.tables.pool
        if not step_time.known:
            return 0.0
        num_tokens = self.config.max_step_tokens
        return step_time.seconds(Load(num_tokens, self.config.max_sequences, num_tokens + pool.num_used * self.config.block_size))

    def stats(self) -> EngineStats:
        """Numbers for heartbeats and metrics."""
        queue, tables, counters = self.batcher.queue, self.batcher.tables, self.batcher.counters
        pool, host, cache = tables.pool, tables.host, tables.counters
        preemptions = self.batcher.admission.counters
        speculation = self.speculator.counters if self.speculator is not None else SpeculationCounters()
        return EngineStats(
            num_running=len(queue.running),
            num_waiting=len(queue.waiting),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            num_prefix_query_tokens=cache.prefix_query_tokens,
            num_prefix_hit_tokens=cache.prefix_hit_tokens,
            num_host_blocks=host.num_slots,
            num_held_host_blocks=host.num_held,
            num_host_query_tokens=cache.host_query_tokens,
            num_host_hit_tokens=cache.host_hit_tokens,
            num_copied_out_blocks=cache.copied_out_blocks,
            num_copied_in_blocks=cache.copied_in_blocks,
            num_computed_tokens=counters.computed_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_class_preemptions=preemptions.of_class,
            num_capacity_preemptions=preemptions.of_capacity,
            num_swaps=preemptions.swapped,
            num_swapped_blocks=cache.swapped_blocks,
            num_swapped_tokens=cache.swapped_tokens,
            step_time_error=self.batcher.step_time.error,
            step_time=self.batcher.step_time.line,
            num_prefill_tokens=self.batcher.num_prefill_tokens,
            num_drafts=speculation.drafts,
            num_draft_tokens=speculation.draft_tokens,
            num_accepted_tokens=speculation.accepted_tokens,
            num_spans_by_accepted=tuple(speculation.runs),
        )

    def check_integrity(self) -> None:
        """Asserts the invariants between steps: every block in one place, referenced as often as tables name it, none when idle."""
        self.batcher.check_integrity()
