"""The mesh beside other engines on this machine's cores: output tokens/s and TTFT of closed-loop clients, medians of interleaved rounds.

Every system has the same model, prompts' lengths and clients; while one is measured, all processes of the others are suspended. Beside
them stands our engine alone: `peers_bound` is what the mesh would reach if all but that cost nothing. Installs the peers into --root
first. Prints JSON lines {"figure", "value", "unit", "target", "holds"}; what couldn't be measured is null there.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figure import line
from bench.peer_servers import SYSTEMS, Load, Site, System, resume, suspend
from bench.peer_venvs import RECIPES, PeerError, versions
from bench.serving import Timing
from services.cli.models import default
from services.worker.engine.loader import read_config

PEERS = ("llama_cpp", "vllm", "openvino")
OUTPUT_TOKENS = 64
PROMPT_TOKENS = {"main": 130, "prefix": 512}
SHARED_TOKENS = {"main": 0, "prefix": 448}
LIKE_FOR_LIKE = 16  # clients, of every part but main
TARGETS = {"peers_c1": 2.5, "peers_c4": 2.0, "peers_c16": 1.8, "peers_c64": 1.4}
_WAKE_SECONDS = 30.0
PARTS = ("main", "bf16", "int8", "prefix")


@dataclass(frozen=True, order=True)
class Cell:
    """A system under so many clients. `kind` is main or prefix: of the prompts."""

    kind: str
    concurrency: int
    system: str

    @property
    def name(self) -> str:
        """As figures call it."""
        return f"{'prefix_' if self.kind == 'prefix' else ''}{self.system}_c{self.concurrency}"


@dataclass(frozen=True)
class Seen:
    """One run of a cell, or the medians of all."""

    tokens_per_s: float
    ttft_ms: float  # p50


@dataclass(frozen=True)
class Comparison:
    """Ours over the best of theirs: in tokens/s, or of TTFT theirs over ours."""

    figure: str
    ours: Cell
    theirs: tuple[Cell, ...]
    target: float | None
    ttft: bool = False

    def line(self, seen: Mapping[Cell, Seen]) -> dict[str, object]:
        """The figure. A peer that wasn't measured might have been the best: then it may fail, but not hold."""
        measured = [seen[cell] for cell in self.theirs if cell in seen]
        if self.ours not in seen or not measured:
            return line(self.figure, None, "x", self.target)
        ours = seen[self.ours]
        if self.ttft:
            value = min(peer.ttft_ms for peer in measured) / ours.ttft_ms
        else:
            value = ours.tokens_per_s / max(peer.tokens_per_s for peer in measured)
        found = line(self.figure, value, "x", self.target)
        return found | {"holds": None} if found["holds"] and len(measured) < len(self.theirs) else found


def comparisons(parts: Sequence[str], concurrencies: Sequence[int]) -> Iterator[Comparison]:
    """What the parts compare."""

    def cells(kind: str, concurrency: int, *systems: str) -> tuple[Cell, ...]:
        return tuple(Cell(kind, concurrency, system) for system in systems)

    for concurrency in concurrencies if "main" in parts else ():
        [ours], theirs = cells("main", concurrency, "mesh_int4"), cells("main", concurrency, *PEERS)
        yield Comparison(f"peers_c{concurrency}", ours, theirs, TARGETS.get(f"peers_c{concurrency}"))
        yield Comparison(f"peers_ttft_c{concurrency}", ours, theirs, 1.0 if concurrency == LIKE_FOR_LIKE else None, ttft=True)
        [bound] = cells("main", concurrency, "engine_int4")
        yield Comparison(f"peers_bound_c{concurrency}", bound, theirs, None)
        yield Comparison(f"peers_mesh_share_c{concurrency}", ours, (bound,), None)
    for part, peer, target in (("bf16", "vllm", 1.0), ("int8", "openvino", None)):
        if part in parts:
            ours, *rest = cells("main", LIKE_FOR_LIKE, f"mesh_{part}", peer)
            yield Comparison(f"peers_{part}_c{LIKE_FOR_LIKE}", ours, tuple(rest), target)
    if "prefix" in parts:
        ours, *rest = cells("prefix", LIKE_FOR_LIKE, "mesh_int4", *PEERS)
        yield Comparison(f"peers_prefix_c{LIKE_FOR_LIKE}", ours, tuple(rest), 2.0)
        [bound] = cells("prefix", LIKE_FOR_LIKE, "engine_int4")
        yield Comparison(f"peers_prefix_bound_c{LIKE_FOR_LIKE}", bound, tuple(rest), None)


def prompts(rng: random.Random, kind: str, count: int, vocab_size: int, shared: Sequence[int]) -> list[list[int]]:
    """Random ids: what is not shared differs from the first token on, so that no cache finds it, and no drafter either."""
    own = PROMPT_TOKENS[kind] - len(shared)
    return [[*shared, *(rng.randrange(100, vocab_size - 100) for _ in range(own))] for _ in range(count)]


def summary(timings: Sequence[Timing]) -> Seen:
    """Of one closed loop."""
    seconds = max(timing.end for timing in timings) - min(timing.start for timing in timings)
    tokens = sum(sum(timing.tokens) for timing in timings)
    return Seen(tokens / seconds, 1e3 * statistics.median(timing.ttft for timing in timings))


def medians(runs: Mapping[Cell, Sequence[Seen]]) -> dict[Cell, Seen]:
    """Over the rounds, of the cells that have any."""
    return {
        cell: Seen(statistics.median(seen.tokens_per_s for seen in found), statistics.median(seen.ttft_ms for seen in found))
        for cell, found in runs.items()
        if found
    }


def rotated(cells: Sequence[Cell], round_: int) -> list[Cell]:
    """By concurrency, so that what is compared is near in time, and each round begins with another system."""
    systems = list(dict.fromkeys(cell.system for cell in cells))
    return sorted(cells, key=lambda cell: (cell.concurrency, (systems.index(cell.system) - round_) % len(systems)))


class Bench:
    """The cells of one kind, measured in turn: every round goes through all of them, and begins with another system."""

    def __init__(self, kind: str, cells: Sequence[Cell], gguf: Path, root: Path) -> None:
        self._kind, self._cells = kind, sorted(cells)
        self._vocab_size = read_config(gguf).vocab_size
        self._rng = random.Random(f"peers {kind}")
        self._shared = [self._rng.randrange(100, self._vocab_size - 100) for _ in range(SHARED_TOKENS[kind])]
        max_length = -(-(PROMPT_TOKENS[kind] + OUTPUT_TOKENS) // 256) * 256
        self._site = Site(gguf, root, max(cell.concurrency for cell in cells), max_length, prefix_cache=kind == "prefix")

    def run(self, rounds: int) -> dict[Cell, list[Seen]]:
        """What was seen of each cell; nothing of a system that didn't come up, and no more of one that failed."""
        runs: dict[Cell, list[Seen]] = {cell: [] for cell in self._cells}
        with contextlib.ExitStack() as stack:
            systems = self._opened(stack)
            for round_ in range(rounds):
                for cell in rotated(self._cells, round_):
                    if cell.system not in systems:
                        continue
                    try:
                        seen = self._measure(systems[cell.system], cell.concurrency)
                    except PeerError as error:
                        say(f"{cell.system} is left out from here on: {error}")
                        del systems[cell.system]
                        continue
                    runs[cell].append(seen)
                    say(f"round {round_ + 1}/{rounds}: {cell.name}: {seen.tokens_per_s:.0f} tok/s, TTFT {seen.ttft_ms:.0f} ms")
        return runs

    def _opened(self, stack: contextlib.ExitStack) -> dict[str, System]:
        """Every system that comes up, warm and suspended."""
        systems: dict[str, System] = {}
        for name in dict.fromkeys(cell.system for cell in self._cells):
            say(f"starting {name}")
            try:
                system = stack.enter_context(SYSTEMS[name](self._site))
                system.run(self._load(min(LIKE_FOR_LIKE, self._site.max_sequences), 1))
            except PeerError as error:
                say(f"{name} is left out: {error}")
                continue
            suspend(system)
            systems[name] = system
        return systems

    def _measure(self, system: System, concurrency: int) -> Seen:
        try:
            self._wake(system)
            return summary(system.run(self._load(concurrency, 2)))
        finally:
            suspend(system)

    def _wake(self, system: System) -> None:
        """Lets it go on until it answers: a mesh that was suspended for long finds its own worker lost at first."""
        resume(system)
        deadline = time.monotonic() + _WAKE_SECONDS
        while True:
            try:
                system.run(self._load(1, 1))
            except PeerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def _load(self, concurrency: int, rounds: int) -> Load:
        """So many prompts for each client, and no fewer than four in all."""
        count = max(4, concurrency * rounds) if rounds > 1 else concurrency
        return Load(prompts(self._rng, self._kind, count, self._vocab_size, self._shared), concurrency, OUTPUT_TOKENS)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def figures(compared: Sequence[Comparison], runs: Mapping[Cell, Sequence[Seen]]) -> Iterator[dict[str, object]]:
    """Versions, every cell's two figures, then the comparisons."""
    for system in dict.fromkeys(cell.system for cell in runs if cell.system in RECIPES):
        yield line(f"peers_version_{system}", versions(system), "version")
    seen = medians(runs)
    for cell in runs:
        found = seen.get(cell)
        yield line(f"peers_{cell.name}", found.tokens_per_s if found else None, "tok/s")
        yield line(f"peers_ttft_{cell.name}", found.ttft_ms if found else None, "ms")
    for comparison in compared:
        yield comparison.line(seen)


def main() -> None:
    """Reads the arguments, installs, runs, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64], help="clients of the part main; the others have 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(".peers"), help="where the peers are installed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is stopped
    compared = list(comparisons(arguments.parts, arguments.concurrency))
    wanted = dict.fromkeys(cell for comparison in compared for cell in (comparison.ours, *comparison.theirs))
    runs: dict[Cell, list[Seen]] = {}
    for kind in PROMPT_TOKENS:
        cells = [cell for cell in wanted if cell.kind == kind and cell.system in arguments.systems]
        if cells:
            runs |= Bench(kind, cells, default().path, arguments.root).run(arguments.rounds)
    for figure in figures(compared, runs):
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
