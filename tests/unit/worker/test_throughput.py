"""SPEC 5's ceiling: resident sequences times steps per second over output length; and the share of it over the last minute."""

import pytest

from services.worker.throughput import WINDOW_SECONDS, Throughput, resident_sequences, theta_max


def test_cache_or_slots_bound_what_is_resident() -> None:
    assert resident_sequences(num_blocks=100, block_size=16, mean_length=400, max_sequences=32) == 4
    assert resident_sequences(num_blocks=100, block_size=16, mean_length=10, max_sequences=32) == 32


def test_the_ceiling_is_a_token_a_step_for_each_that_is_resident() -> None:
    assert theta_max(resident=4, steps_per_second=50, mean_output=100) == 2


def test_the_last_minute_tells_the_ceiling_and_the_share() -> None:
    throughput = Throughput(num_blocks=100, block_size=16, max_sequences=32)
    assert throughput.theta_max(0) is None
    assert throughput.share(0) is None
    throughput.record_steps(1000, 25, 0.5)
    throughput.record_end(1000, n=1, num_prompt_tokens=300, num_output_tokens=100)
    throughput.record_steps(1010, 25, 0.5)
    throughput.record_end(1010, n=1, num_prompt_tokens=300, num_output_tokens=100)
    assert throughput.theta_max(1010) == pytest.approx(4 * 50 / 100)
    assert throughput.share(1010) == pytest.approx(2 / 10 / 2)


def test_choices_count_one_by_one() -> None:
    throughput = Throughput(num_blocks=100, block_size=16, max_sequences=32)
    throughput.record_steps(0, 50, 1.0)
    throughput.record_end(0, n=2, num_prompt_tokens=300, num_output_tokens=200)
    assert throughput.theta_max(0) == pytest.approx(2)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    throughput = Throughput(num_blocks=100, block_size=16, max_sequences=32)
    throughput.record_steps(0, 50, 1.0)
    throughput.record_end(0, n=1, num_prompt_tokens=300, num_output_tokens=100)
    assert throughput.theta_max(WINDOW_SECONDS) is not None
    assert throughput.theta_max(WINDOW_SECONDS + 1) is None
