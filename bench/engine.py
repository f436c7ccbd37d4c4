"""Step times of the CPU kernels beside what the machine could do at most, all in one process, interleaved, as medians.

The bound of decoding alone is its bytes (weights and cache) over the bandwidth of reading a large buffer; that of many rows is the
same products alone plus the cache's bytes. Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.figure import line, show
from services.cli.models import default
from services.worker.engine.batch import Batch, Runner, SpanResult
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, SamplingParams
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.native import NUM_SPINS, NativeDecoder
from services.worker.engine.models.step import Step

CONTEXT = 190  # tokens of each sequence, as in a chat that has begun
PREFILL = 512
BLOCK_SIZE = 16
BATCHES = (1, 4, 16, 64)
BUFFER_BYTES = 256 << 20
TARGETS = {"bound_b1": 0.8, "bound_b64": 0.65, "bound_prefill": 0.75}
MAX_HOST_SHARE = 0.05


class Probe:
    """The machine's limits by the kernels' own threads, in seconds."""

    def __init__(self, compiled: library.Library, num_threads: int) -> None:
        self._functions = compiled.functions
        self._handle = ctypes.c_void_p()
        assert self._functions.forebay_probe_open(num_threads, NUM_SPINS, ctypes.byref(self._handle)) == 0
        self._buffer = torch.ones(BUFFER_BYTES, dtype=torch.uint8)

    def seconds_per_byte(self) -> float:
        """Of reading the buffer once."""
        seconds: float = self._functions.forebay_probe_read(self._handle, self._buffer.data_ptr(), BUFFER_BYTES)
        return seconds / BUFFER_BYTES

    def multiply(self, matrices: list[library.Matrix], num_rows: int, num_head_rows: int) -> float:
        """All products of a step, one after another; the last matrix is the head."""
        rows = [num_rows] * (len(matrices) - 1) + [num_head_rows]
        return sum(float(self._functions.forebay_probe_multiply(self._handle, m, n)) for m, n in zip(matrices, rows, strict=True))


@dataclass(frozen=True)
class Load:
    """A step of `batch` sequences with `length` new tokens each behind a context of `before`."""

    batch: int
    length: int
    before: int

    def step(self, logit_rows: int = 1) -> Step:
        blocks = -(-(self.before + self.length) // BLOCK_SIZE)
        ends = [(i + 1) * self.length for i in range(self.batch)]
        return Step(
            tokens=[1 + i % 1000 for i in range(self.batch * self.length)],
            query_lengths=[self.length] * self.batch,
            context_lengths=[self.before + self.length] * self.batch,
            block_tables=[list(range(i * blocks, (i + 1) * blocks)) for i in range(self.batch)],
            logit_rows=[end - 1 - row for end in ends for row in reversed(range(logit_rows))],
        )


LOADS = {f"b{batch}": Load(batch, 1, CONTEXT) for batch in BATCHES}
LOADS |= {"verify_5": Load(1, 5, CONTEXT), "prefill": Load(1, PREFILL, 0)}


class TimedRunner:
    """Another runner, and how long it took."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def copy(self, batch: Batch) -> None:
        """See Runner."""
        self._runner.copy(batch)

    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner."""
        started = time.perf_counter()
        results = self._runner.execute(batch)
        self.seconds += time.perf_counter() - started
        return results


def seconds(f: Callable[[], object]) -> float:
    started = time.perf_counter()
    f()
    return time.perf_counter() - started


def layer_major(cache: NativeCache) -> NativeCache:
    """The same cache with all blocks of a layer side by side."""

    class LayerMajor(NativeCache):
        def wire(self) -> library.Cache:
            wire = super().wire()
            wire.block_bytes, wire.layer_bytes = wire.layer_bytes, wire.layer_bytes * self.num_blocks
            return wire

    return LayerMajor(cache.config, cache.num_blocks, cache.block_size, cache.kv_format)


class Bench:
    """One level's steps."""

    def __init__(self, path: Path, level: str, num_threads: int) -> None:
        self.level = level
        config = EngineConfig(level=level, num_blocks=BATCHES[-1] * 16, max_sequences=64, num_threads=num_threads, backend="native")
        self.engine = Engine.from_path(path, config)
        runner = self.engine.runner
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner.model, NativeDecoder)
        self.decoder, self.cache = runner.model, runner.kv
        compiled = library.find()
        assert compiled is not None
        self.probe = Probe(compiled, num_threads)

    def run(self, rounds: int) -> None:
        """Measures everything once per round and prints the medians."""
        times: dict[str, list[float]] = {name: [] for name in LOADS}
        products: dict[str, list[float]] = {"b64": [], "prefill": []}
        reads: list[float] = []
        for _ in range(rounds):
            for name, load in LOADS.items():
                step = load.step(5 if name == "verify_5" else 1)
                times[name].append(seconds(lambda step=step: self.decoder.forward(step, self.cache)))  # type: ignore[misc]
            products["b64"].append(self.probe.multiply(self.decoder.matrices, 64, 64))
            products["prefill"].append(self.probe.multiply(self.decoder.matrices, PREFILL, 1))
            reads.append(self.probe.seconds_per_byte())
        per_byte = statistics.median(reads)
        show(line("read_bandwidth", 1e-9 / per_byte, "GB/s"))
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, value in medians.items():
            show(line(f"step_{name}_{self.level}", 1e3 * value, "ms"))
        bounds = {
            "bound_b1": per_byte * (self._weight_bytes() + self._cache_bytes(1)),
            "bound_b64": statistics.median(products["b64"]) + per_byte * self._cache_bytes(64),
            "bound_prefill": statistics.median(products["prefill"]),
        }
        for name, bound in bounds.items():
            share = bound / medians[name.removeprefix("bound_")]
            show(line(f"{name}_ms_{self.level}", 1e3 * bound, "ms"))
            show(line(name if self.level == "int4" else f"{name}_{self.level}", share, "of the bound", TARGETS[name]))

    def layouts(self, rounds: int) -> None:
        """Block-major against layer-major pages at batch 64: over 1, block-major is faster."""
        other = layer_major(self.cache)
        compiled, step = library.find(), LOADS["b64"].step()
        assert compiled is not None
        blocks, layers = [], []
        for _ in range(rounds):
            self.decoder.bind(self.cache)
            self.decoder.forward(step, self.cache)
            blocks += [seconds(lambda: self.decoder.forward(step, self.cache)) for _ in range(3)]
            self.decoder.bind(other)
            self.decoder.forward(step, other)
            layers += [seconds(lambda: self.decoder.forward(step, other)) for _ in range(3)]
        self.decoder.bind(self.cache)
        show(line("layer_major_over_block_major", statistics.median(layers) / statistics.median(blocks), "time ratio"))

    def host_share(self, batch: int, num_steps: int) -> float:
        """Part of a step that is neither the forward nor the choice of tokens: scheduling, lists of ints, bookkeeping."""
        for i in range(batch):
            prompt = [1 + (7 * i + j) % 1000 for j in range(CONTEXT)]
            self.engine.add(EngineRequest(f"{batch}-{i}", prompt, SamplingParams(max_tokens=num_steps + 4, temperature=0, ignore_eos=True)))
        while any(sequence.num_output_tokens == 0 for sequence in self.engine.batcher.queue.running) or self.engine.batcher.queue.waiting:
            self.engine.step(0.0)
        runner = self.engine.runner
        timed = self.engine.runner = TimedRunner(runner)
        whole = sum(seconds(lambda: self.engine.step(0.0)) for _ in range(num_steps))
        self.engine.runner = runner
        while self.engine.has_work:
            self.engine.step(0.0)
        return 1 - timed.seconds / whole

    def _weight_bytes(self) -> int:
        sizes = {0: 4096, 1: 2048, 2: 1088, 3: 640}  # bytes of 32 x 32 weights, by format: see matmul.h
        return sum(m.num_inputs // 32 * (m.num_outputs // 32) * sizes[m.format] for m in self.decoder.matrices)

    def _cache_bytes(self, batch: int) -> int:
        return batch * (CONTEXT + 1) * int(self.cache.pages.shape[1]) // BLOCK_SIZE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or folder; left out: the default model")
    parser.add_argument("--levels", nargs="+", default=["int4", "int8", "bf16"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if library.find() is None:
        print("no compiled kernels fit this machine: run make setup", file=sys.stderr)
        return 1
    torch.set_num_threads(arguments.threads)
    for level in arguments.levels:
        bench = Bench(arguments.model or default().path, level, arguments.threads)
        bench.run(arguments.rounds)
        if level == "int4":
            bench.layouts(max(2, arguments.rounds // 4))
            for batch in (1, 64):
                share = bench.host_share(batch, 60)
                show(line("host_share" if batch == 1 else f"host_share_b{batch}", share, "of a step", MAX_HOST_SHARE, at_most=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
