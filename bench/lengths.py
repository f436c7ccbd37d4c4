"""Prompt and output lengths for load: fixed, or drawn from a published trace."""

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lengths:
    """Draws (prompt tokens, output tokens). `mean` is their mean sum."""

    draw: Callable[[random.Random], tuple[int, int]]
    mean: float

    def __call__(self, rng: random.Random) -> tuple[int, int]:
        return self.draw(rng)


def fixed(prompt_tokens: int, output_tokens: int) -> Lengths:
    """The same for every request."""
    return Lengths(lambda _: (prompt_tokens, output_tokens), prompt_tokens + output_tokens)


def _scaled(tokens: str, scale: float) -> int:
    return max(1, round(int(tokens) * scale))


def scaled_pairs(path: Path, prompt_scale: float, output_scale: float) -> Sequence[tuple[int, int]]:
    """(prompt, output) of an Azure LLM inference trace's rows (TIMESTAMP, ContextTokens, GeneratedTokens), each times its factor."""
    with path.open(newline="") as file:
        return [
            (_scaled(row["ContextTokens"], prompt_scale), _scaled(row["GeneratedTokens"], output_scale)) for row in csv.DictReader(file)
        ]


def from_trace(path: Path, scale: float) -> Lengths:
    """Drawn from a trace's rows, lengths times `scale`."""
    pairs = scaled_pairs(path, scale, scale)
    return Lengths(lambda rng: rng.choice(pairs), sum(map(sum, pairs)) / len(pairs))
