"""What it costs to go from one resident model to another, and how soon pages go to whoever is busy. Part of `make bench-sharing`."""

import random
import statistics
import time
from collections.abc import Callable

from torch import Tensor

from bench.figure import line, show
from bench.sharing_device import SMALL, Device, make, request
from services.worker.engine.batch import Batch
from services.worker.engine.model_runner import ModelRunner

NUM_REQUESTS, PROMPT, OUTPUT = 8, 112, 16  # that fill the pool
PAGES_PER_REQUEST = (PROMPT + OUTPUT) // 16


class _Clocked:
    """Notes when a device's decoders begin and end to compute."""

    def __init__(self, device: Device) -> None:
        self.ended: float | None = None
        self.between: list[float] = []  # seconds from the end of one forward pass to the beginning of the next
        self.inside: list[float] = []
        for engine in device.engines.values():
            assert isinstance(engine.runner, ModelRunner)
            engine.runner._forward = self._clocked(engine.runner._forward)  # type: ignore[method-assign, assignment]

    def _clocked(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        def clocked(batch: Batch) -> Tensor:
            began = time.perf_counter()
            if self.ended is not None:
                self.between.append(began - self.ended)
            logits = forward(batch)
            self.ended = time.perf_counter()
            self.inside.append(self.ended - began)
            return logits

        return clocked


def _decode(device: Device, clocked: _Clocked, models: str, rng: random.Random) -> tuple[float, float]:
    """Each of the models has one sequence, and they step by turns: medians of the seconds (between, inside) of their forward passes."""
    clocked.between, clocked.inside, clocked.ended = [], [], None
    for model in models:
        device.shared.add(request(f"{models} {model} {rng.random()}", model, SMALL.vocab_size, rng, output=32, prompt=8))
    while device.shared.has_work:
        stepped = device.shared.step(time.perf_counter())
        device.shared.took(stepped.model, 1.0)  # the same for each, or they wouldn't take turns
    return statistics.median(clocked.between), statistics.median(clocked.inside)


def between_residents(num_rounds: int, num_threads: int) -> None:
    """From one model's forward pass to the other's; and what a pass takes longer as the CPU's caches hold the other's weights."""
    device, rng = make(SMALL, ["a", "b"], None, 1 << 26, num_threads), random.Random(0)
    clocked = _Clocked(device)
    switches, longer = [], []
    for number in range(num_rounds + 1):
        own = [_decode(device, clocked, model, rng) for model in ("a", "b")]
        switch, inside = _decode(device, clocked, "ab", rng)
        if number:
            switches.append(switch)
            longer.append(inside / statistics.mean(alone for _, alone in own))
    show(line("resident_switch_seconds", statistics.median(switches), "s from one model's pass to another's", 0.001, at_most=True))
    show(line("resident_pass_ratio", statistics.median(longer), "of a pass behind its own, as caches hold the other's weights"))


def pool_moves(num_rounds: int, num_threads: int) -> None:
    """All pages have been one model's; then the other has as much to do."""
    page_bytes = 16 * SMALL.kv_bytes_per_token(2)
    device, rng = make(SMALL, ["a", "b"], None, NUM_REQUESTS * PAGES_PER_REQUEST * page_bytes, num_threads), random.Random(1)
    took = []
    for number in range(2 * num_rounds + 1):
        model, pool = "ab"[number % 2], device.engines["ab"[number % 2]].batcher.tables.pool
        assert pool.num_used == 0
        for index in range(NUM_REQUESTS):
            device.shared.add(request(f"{number} {index}", model, SMALL.vocab_size, rng, OUTPUT, PROMPT))
        started, moved = time.perf_counter(), None
        while device.shared.has_work:
            stepped = device.shared.step(time.perf_counter())
            device.shared.took(stepped.model, 0.01)
            if moved is None and pool.num_used >= 0.75 * pool.num_blocks:
                moved = time.perf_counter() - started
        if number:
            took.append(moved)
    seconds = None if None in took else statistics.median(value for value in took if value is not None)
    show(line("pool_moves_seconds", seconds, "s until three quarters of the other's pages are the busy one's", 1.0, at_most=True))
