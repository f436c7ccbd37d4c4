"""Speculation on against off, in interleaved pairs on one engine: speed by kind of answer, the worst case, acceptance.

Prints JSON lines {"figure", "value", "unit", "target", "holds"}. Every pair's tokens are compared, too: they must be equal. Prompts are in
the prefix cache after a first pass, so that what is timed is decoding.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.figure import line
from bench.speculation_prompts import PROMPTS
from services.cli.models import default
from services.gateway.models import load_model
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine, EngineRequest, SamplingParams
from services.worker.engine.loader import suggested_level
from services.worker.engine.quantization import LEVELS

TARGETS = {"quote": 3.0, "rewrite": 3.0, "code": 2.0, "summarise": 2.0, "json": 1.4}
WORST_TARGET = 0.95
SELF_SET, SELF_LEVEL, SELF_DRAFT_LEVEL, SELF_TARGET = "chat", "bf16", "int4", 1.4
# Student's t, 95 % on one side, by degrees of freedom; beyond, the normal distribution's.
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)


@dataclass
class Cell:
    """One set at one batch size: the logarithms of off over on, and what the drafts came to."""

    logs: list[float] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0

    @property
    def ratio(self) -> float:
        """How many times as fast with speculation: the median over the rounds."""
        return math.exp(statistics.median(self.logs))

    @property
    def lower_bound(self) -> float:
        """Of the geometric mean, at 95 %."""
        freedom = len(self.logs) - 1
        t = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.645
        return math.exp(statistics.mean(self.logs) - t * statistics.stdev(self.logs) / math.sqrt(len(self.logs)))


@dataclass(frozen=True)
class Plan:
    """What is run: prompts' token ids by set, batch sizes, rounds, output tokens per prompt."""

    prompts: dict[str, list[list[int]]]
    batches: Sequence[int]
    rounds: int
    max_tokens: int


class Bench:
    """One engine, whose speculator is taken away and put back: two engines would differ by where their memory lies, too."""

    def __init__(self, path: Path, plan: Plan, config: EngineConfig) -> None:
        self._plan = plan
        self._engine = Engine.from_path(path, config)
        assert self._engine.speculator is not None
        self._speculator = self._engine.speculator

    def cells(self) -> dict[tuple[str, int], Cell]:
        """Measures every set at every batch size, all of them once per round."""
        cells = {(name, batch): Cell() for name in self._plan.prompts for batch in self._plan.batches}
        for round_ in range(-1, self._plan.rounds):
            for (name, batch), cell in cells.items():
                self._pair(cell, self._plan.prompts[name], batch, round_)
                if sys.stderr.isatty():
                    print(f"\rround {round_ + 1}/{self._plan.rounds}: {name} at {batch}   ", end="", file=sys.stderr, flush=True)
        return cells

    def _pair(self, cell: Cell, prompts: Sequence[Sequence[int]], batch: int, round_: int) -> None:
        """One run with, one without; who begins changes by round. Round -1 fills the prefix caches and learns, and isn't counted."""
        before = replace(self._speculator.counters)
        timed = {speculates: self._run(prompts, batch, speculates) for speculates in ((False, True) if round_ % 2 else (True, False))}
        (off_seconds, off_tokens), (on_seconds, on_tokens) = timed[False], timed[True]
        if off_tokens != on_tokens:
            raise RuntimeError("tokens with speculation differ from those without")
        if round_ >= 0:
            cell.logs.append(math.log(off_seconds / on_seconds))
            after = self._speculator.counters
            cell.num_draft_tokens += after.draft_tokens - before.draft_tokens
            cell.num_accepted_tokens += after.accepted_tokens - before.accepted_tokens
            cell.num_tokens += sum(map(len, on_tokens))

    def _run(self, prompts: Sequence[Sequence[int]], batch: int, speculates: bool) -> tuple[float, list[list[int]]]:
        """(seconds, tokens by request): every prompt as often as it takes, always `batch` of them side by side, until the last ends."""
        engine = self._engine
        engine.batcher.speculator = self._speculator if speculates else None
        sampling = SamplingParams(max_tokens=self._plan.max_tokens, temperature=0)
        count = -(-max(len(prompts), 3 * batch // 2) // len(prompts)) * len(prompts)
        tokens: list[list[int]] = [[] for _ in range(count)]
        started = time.perf_counter()
        num_added = num_ended = 0
        while num_ended < count:
            while num_added < min(count, num_ended + batch):
                engine.add(EngineRequest(str(num_added), prompts[num_added % len(prompts)], sampling))
                num_added += 1
            for output in engine.step(time.perf_counter()):
                tokens[int(output.request_id)] += output.token_ids
                num_ended += output.finish_reason is not None
        return time.perf_counter() - started, tokens


def figures(cells: dict[tuple[str, int], Cell]) -> Iterator[dict[str, object]]:
    """The JSON lines: speed at the smallest batch and acceptance of each set, then each cell's lower bound, then the worst."""
    smallest = min(batch for _, batch in cells)
    for (name, batch), cell in cells.items():
        if batch == smallest:
            yield line(f"spec_{name}", cell.ratio, "x", TARGETS.get(name))
            yield line(f"spec_acceptance_{name}", cell.num_accepted_tokens / max(1, cell.num_draft_tokens), "of drafts")
            yield line(f"spec_accepted_share_{name}", cell.num_accepted_tokens / max(1, cell.num_tokens), "of tokens")
    if any(len(cell.logs) < 2 for cell in cells.values()):
        return  # no bound from one round
    for (name, batch), cell in cells.items():
        yield line(f"spec_lower_{name}_c{batch}", cell.lower_bound, "x")
    yield line("spec_worst", min(cell.lower_bound for cell in cells.values()), "x", WORST_TARGET)


def self_figures(path: Path, plan: Plan, config: EngineConfig) -> Iterator[dict[str, object]]:
    """The JSON lines of weights that draft for themselves at fewer bits, one sequence at a time."""
    alone = replace(plan, prompts={SELF_SET: plan.prompts[SELF_SET]}, batches=[1])
    (cell,) = Bench(path, alone, replace(config, level=SELF_LEVEL, draft_level=SELF_DRAFT_LEVEL)).cells().values()
    yield line(f"spec_self_{SELF_SET}", cell.ratio, "x", SELF_TARGET)
    yield line(f"spec_acceptance_self_{SELF_SET}", cell.num_accepted_tokens / max(1, cell.num_draft_tokens), "of drafts")


def tokenised(path: Path, names: Sequence[str], num_prompts: int) -> dict[str, list[list[int]]]:
    """The prompts of some sets as the model's chat template renders them."""
    model = load_model(path, "model")
    if model.template is None:
        raise SystemExit(f"{path} has no chat template")
    template, encode = model.template, model.tokenizer.encode
    return {
        name: [encode(template.render([{"role": "user", "content": text}]), add_special=False) for text in PROMPTS[name][:num_prompts]]
        for name in names
    }


def main() -> None:
    """Reads the arguments, runs, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--sets", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--prompts", type=int, default=5, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-drafts", type=int, default=8)
    parser.add_argument("--level", default=None, choices=LEVELS, help="of the weights; default: the file's own")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    path = arguments.model or default().path
    prompts = tokenised(path, arguments.sets, arguments.prompts)
    longest = max(len(prompt) for items in prompts.values() for prompt in items) + arguments.max_tokens
    config = EngineConfig(
        num_blocks=-(-longest // 16) * (max(arguments.batches) + 40),
        max_sequences=max(arguments.batches),
        max_step_tokens=512,
        num_threads=arguments.threads,
        level=arguments.level or suggested_level(path),
        speculation=arguments.max_drafts,
    )
    plan = Plan(prompts, arguments.batches, arguments.rounds, arguments.max_tokens)
    for figure in figures(Bench(path, plan, config).cells()):
        print(json.dumps(figure), flush=True)
    if SELF_SET in prompts:
        for figure in self_figures(path, plan, config):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
