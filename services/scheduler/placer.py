"""Brings models to devices ahead of requests: reads, lets the policy decide, tells workers. One scheduler of the mesh does so at a time."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from forebay.v1 import admin_pb2, scheduler_pb2
from services.common import log
from services.common.errors import StatusError
from services.scheduler.affinity import Affinity, Kept, Led
from services.scheduler.metrics import Metrics
from services.scheduler.model_acts import ModelActs
from services.scheduler.policy.node import NodeState, StepCost, full_rate
from services.scheduler.policy.placement import Demand, Device, Entry, Placements, decide
from services.scheduler.registry import Registry, seconds_to_load

LOG = log.get(__name__)

Lines = Callable[[], Mapping[tuple[str, int], tuple[int, float]]]
"""(model, class) -> (tickets waiting, seconds that the oldest has waited)"""


class Placer:
    """`lines` tells what waits; see Keeper."""

    def __init__(
        self, affinity: Affinity, registry: Registry, lines: Lines, acts: ModelActs, metrics: Metrics, *, poll_seconds: float
    ) -> None:
        self._affinity = affinity
        self._registry = registry
        self._lines = lines
        self._acts = acts
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self.loads: Mapping[str, float] = {}
        """Worker -> sum of lambda_i / mu_i_shared, where this scheduler leads."""

    async def run(self) -> None:
        """For ever."""
        while True:
            with suppress(StatusError):  # Redis is away, or a worker has just gone.
                self.loads = (await self.place()).loads
            await asyncio.sleep(self._poll_seconds)

    async def place(self) -> Placements:
        """One round; nothing where another scheduler leads."""
        workers = [worker for worker in self._registry.states(time.monotonic()) if worker.ready]
        models = {state.model for worker in workers for state in worker.heartbeat.models}
        led = await self._affinity.lead(models)
        if led is None:
            return Placements()
        placements = decide([device(worker, led) for worker in workers], self._demands(led), led.now)
        asked = {(p.model, p.worker_id): led.now for p in placements.prefetches}
        # Written before it is sent: who takes over from here doesn't ask again.
        if not await self._affinity.write(_matrix(workers, led, asked)):
            return Placements()
        for prefetch in placements.prefetches:
            LOG.info("prefetch", model=prefetch.model, worker=prefetch.worker_id)
            self._metrics.prefetches.labels(prefetch.model).inc()
            await self._acts.send(prefetch.worker_id, scheduler_pb2.MODEL_ACT_KIND_PREFETCH, prefetch.model)
        return placements

    def _demands(self, led: Led) -> dict[str, Demand]:
        waiting: dict[str, tuple[int, float]] = {}
        for (model, _), (num, oldest) in self._lines().items():
            so_far, oldest_so_far = waiting.get(model, (0, 0.0))
            waiting[model] = so_far + num, max(oldest, oldest_so_far)
        return {model: Demand(led.rates.get(model, 0.0), *waiting.get(model, (0, 0.0))) for model in {*led.rates, *waiting}}


def device(worker: admin_pb2.WorkerState, led: Led) -> Device:
    """A worker as the policy sees it."""
    beat, registration = worker.heartbeat, worker.registration
    num_blocks = {model.model: model.num_blocks for model in registration.models}
    used = sum(state.num_used_blocks for state in beat.models)
    entries = {}
    for state in beat.models:
        kept = led.matrix.get((state.model, registration.worker_id))
        entries[state.model] = Entry(
            is_on_device=state.place in (scheduler_pb2.MODEL_PLACE_DEVICE, scheduler_pb2.MODEL_PLACE_LOADING),
            num_bytes=state.num_bytes,
            load_seconds=seconds_to_load(state),
            tokens_per_second=_rate(registration, state),
            share=1 - min(1.0, (used - state.num_used_blocks) / max(1, num_blocks.get(state.model, 0))),
            num_requests=state.num_requests,
            stay_seconds=state.stay_seconds,
            pinned=state.pinned,
            failed=state.place == scheduler_pb2.MODEL_PLACE_COLD,
            movable=state.num_bytes > 0,
            asked_at=kept.asked_at if kept is not None else 0.0,
        )
    return Device(registration.worker_id, beat.budget.weights_bytes, entries)


def _rate(registration: scheduler_pb2.Register, state: scheduler_pb2.ModelState) -> float:
    """mu: tokens per second of full steps, with the worker for itself; 0 while it isn't known."""
    if not state.HasField("step_time"):
        return 0.0
    step = state.step_time
    cost = StepCost(step.fixed_seconds, step.token_seconds, step.row_seconds, step.key_seconds)
    return full_rate(NodeState(cost, registration.max_step_tokens or NodeState().max_step_tokens))


def _matrix(workers: list[admin_pb2.WorkerState], led: Led, asked: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], Kept]:
    matrix = {}
    for worker in workers:
        for state in worker.heartbeat.models:
            key = state.model, worker.registration.worker_id
            before = led.matrix.get(key)
            asked_at = asked.get(key, before.asked_at if before is not None else 0.0)
            matrix[key] = Kept(state.place == scheduler_pb2.MODEL_PLACE_DEVICE, asked_at)
    return matrix
