"""Published traces as requests: when they came, how long they were, and which beginnings they share. Read from files; draws nothing."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

BLOCK_TOKENS = 512
"""Tokens that one id of a Mooncake trace stands for."""
MAX_PROMPT_TOKENS = 120_000
SAMPLE = Path(__file__).with_name("sample.jsonl")
"""A little synthetic trace of the Mooncake format, for checkouts without the published ones."""
FILES = {
    "mooncake_conversation": "mooncake_conversation.jsonl",
    "mooncake_synthetic": "mooncake_synthetic.jsonl",
    "azure_conversation": "AzureLLMInferenceTrace_conv.csv",
    "azure_code": "AzureLLMInferenceTrace_code.csv",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `blocks` name the prompt's beginning, BLOCK_TOKENS each, chained; empty where the trace doesn't say."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()

    @property
    def session(self) -> int | None:
        """What requests of one conversation have in common; None: nothing is known."""
        return self.blocks[min(1, len(self.blocks) - 1)] if self.blocks else None


def load(path: Path) -> list[Row]:
    """A trace of Mooncake (.jsonl) or Azure (.csv), in order of time, from 0 s."""
    rows = _mooncake(path) if path.suffix == ".jsonl" else _azure(path)
    rows.sort(key=lambda row: row.at)
    return [replace(row, at=row.at - rows[0].at) for row in rows]


def _mooncake(path: Path) -> list[Row]:
    with path.open() as file:
        return [
            _row(r["timestamp"] / 1000, r["input_length"], r["output_length"], tuple(r["hash_ids"])) for r in map(json.loads, file) if r
        ]


def _azure(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [
            # Seven digits behind the comma are one more than datetime reads.
            _row(datetime.fromisoformat(r["TIMESTAMP"][:26]).timestamp(), int(r["ContextTokens"]), int(r["GeneratedTokens"]))
            for r in csv.DictReader(file)
        ]


def _row(at: float, num_prompt: int, num_output: int, blocks: tuple[int, ...] = ()) -> Row:
    num_prompt = min(max(1, num_prompt), MAX_PROMPT_TOKENS)
    return Row(at, num_prompt, max(1, num_output), blocks[: (num_prompt - 1) // BLOCK_TOKENS])


def window(rows: Sequence[Row], start: int, count: int) -> list[Row]:
    """So many rows from there on; behind the trace's end it begins again, with other prompts."""
    span, stride = rows[-1].at + 1.0, 1 + max((block for row in rows for block in row.blocks), default=0)
    taken = []
    for index in range(start, start + count):
        lap, place = divmod(index, len(rows))
        row = rows[place]
        blocks = tuple(block + lap * stride for block in row.blocks) if lap else row.blocks
        taken.append(replace(row, at=row.at + lap * span, blocks=blocks))
    return [replace(row, at=row.at - taken[0].at) for row in taken]


def ideal_hits(rows: Sequence[Row]) -> int:
    """Prompt tokens that one cache without end would have, each request after those before it."""
    seen: set[int] = set()
    num_tokens = 0
    for row in rows:
        known = next((i for i, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        num_tokens += known * BLOCK_TOKENS
        seen.update(row.blocks)
    return num_tokens
