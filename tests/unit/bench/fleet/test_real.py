"""What two real workers are compared with: the shrunk trace, its prompts and its simulation."""

from itertools import pairwise

import pytest

from bench.fleet.devices import StepLaw
from bench.fleet.node import Engine
from bench.fleet.real import MAX_PROMPT_TOKENS, Seen, compared, of_prefixes, prompt_of, shrunk, simulated
from bench.fleet.trace import BLOCK_TOKENS, SAMPLE, Row, load
from bench.serving import Timing
from services.gateway.prefix import HASH_TOKENS, block_hashes

LAW = StepLaw(0.01, 0.001, 0.0, 0.0, 0.0)


def seen(ttft: float, end: float, num_cached: int = 0) -> Seen:
    return Seen(Timing(0.0, [ttft], [1.0], end), num_cached)


def figures(lines: object) -> dict[object, object]:
    return {line["figure"]: line["value"] for line in lines}  # type: ignore[attr-defined]


def test_a_shrunk_trace_keeps_what_its_prompts_share() -> None:
    rows = load(SAMPLE)
    small = shrunk(rows)
    kept = [row for row in rows if row.num_prompt_tokens <= MAX_PROMPT_TOKENS * 8]
    assert [row.at for row in small] == [row.at for row in kept]
    assert len(small) > 10
    assert all(abs(len(a.blocks) - len(b.blocks)) <= 1 and a.blocks == b.blocks[: len(a.blocks)] for a, b in zip(small, kept, strict=True))
    assert all(row.num_prompt_tokens > HASH_TOKENS * len(row.blocks) for row in small), "a token is left to compute"


def test_prompts_share_beginnings_as_their_rows_share_blocks() -> None:
    rows = [Row(0, 200, 4, (1, 2, 3)), Row(0, 200, 4, (1, 2, 4)), Row(0, 100, 4)]
    prompts = [prompt_of(row, number, 5000) for number, row in enumerate(rows)]
    assert [len(prompt.token_ids) for prompt in prompts] == [200, 200, 100]
    first, second, third = (block_hashes(b"salt", "v1", prompt.token_ids) for prompt in prompts)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
    assert third[0] != first[0]


def test_the_simulation_has_the_workers_step_times_and_settings() -> None:
    """One step of 100 tokens, then one token each: nothing else is at work."""
    ((first, end),) = simulated([Row(1.0, 100, 5)], {"w": LAW}, {"w": Engine(64, HASH_TOKENS, 32, 2, 256)})
    assert first == pytest.approx(0.01 + 100 * 0.001)
    assert end - first == pytest.approx(4 * (0.01 + 0.001))
    ((chunked, _),) = simulated([Row(1.0, 100, 5)], {"w": LAW}, {"w": Engine(64, HASH_TOKENS, 32, 2, 50)})
    assert chunked == pytest.approx(2 * (0.01 + 50 * 0.001))
    ends = sorted(end for _, end in simulated([Row(0.0, 100, 5)] * 3, {"w": LAW}, {"w": Engine(64, HASH_TOKENS, 1, 0, 256)}))
    assert all(later - earlier > 0.1 for earlier, later in pairwise(ends)), "one at a time"


def test_the_error_is_the_worse_of_both_medians() -> None:
    told = figures(compared([seen(1.0, 2.0), seen(1.0, 2.0)], [(1.1, 1.4), (1.1, 1.4)], 1.0))
    assert told["sim_error_p50"] == pytest.approx(0.3)
    assert told["sim_ttft_error_of_one"] == pytest.approx(0.1)
    assert (told["real_total_p50"], told["sim_total_p50"]) == (2.0, 1.4)


def test_the_gain_by_prefix_is_round_robins_time_over_ours() -> None:
    told = figures(of_prefixes({"seconds": [seen(1.0, 2.0, 512)], "round_robin": [seen(3.0, 4.0, 256)]}))
    assert (told["prefix_hit_share_seconds"], told["prefix_hit_share_round_robin"], told["prefix_ttft_gain"]) == (1.0, 0.5, 3.0)
    assert BLOCK_TOKENS == 8 * HASH_TOKENS, "what a block of the trace shrinks to"
