"""What the load generator makes of what it saw."""

import random
from pathlib import Path

import pytest

from bench.lengths import fixed, from_trace
from bench.serving import Timing, percentile


def test_tokens_are_scaled_to_the_usage() -> None:
    timing = Timing(0.0, arrivals=[1.0, 3.0, 3.5], tokens=[5, 10, 5])  # characters
    timing.ended(4)
    assert timing.tokens == [1.0, 2.0, 1.0]
    assert timing.ttft == 1.0
    assert list(timing.gaps) == [1.0, 1.0, 0.5]


def test_a_message_without_tokens_is_no_arrival() -> None:
    timing = Timing(0.0)
    timing.arrived(0)
    timing.arrived(2)
    assert len(timing.arrivals) == 1


@pytest.mark.parametrize(("q", "expected"), [(0.5, 2), (0.99, 4), (0.25, 1), (0.26, 2), (0.0, 1)])
def test_percentile_is_the_nearest_rank(q: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], q) == expected


def test_lengths_come_fixed_or_from_a_trace(tmp_path: Path) -> None:
    assert fixed(130, 64)(random.Random(0)) == (130, 64)
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4000,10\n2023-11-16 18:17:04,200,3\n")
    lengths = from_trace(trace, 0.1)
    assert {lengths(random.Random(seed)) for seed in range(20)} == {(400, 1), (20, 1)}
    assert lengths.mean == 211
