"""What a step's tokens and seconds are spent on."""

import pytest

from services.worker.engine.budget import LEAST_CHUNK, Budget
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import RequestState, Sequence, SequenceState
from services.worker.engine.step_time import Load, StepTime


def sequence(num_tokens: int, num_computed: int = 0) -> Sequence:
    group = RequestState(EngineRequest("r", [1] * num_tokens), b"", [])
    return Sequence(group, 0, [1] * num_tokens, num_tokens, 100, frozenset(), [], SequenceState.RUNNING, num_computed_tokens=num_computed)


def budget(tokens: int = 256) -> Budget:
    """Steps take 10 ms and 1 ms per token."""
    step_time = StepTime()
    for num_tokens in (1, 4, 16, 64, 256) * 8:
        step_time.record(Load(num_tokens, 1, 10), 10e-3 + 1e-3 * num_tokens)
    return Budget(tokens, 256, step_time)


def length(found: object) -> int:
    return getattr(found, "length", 0)


def test_tokens_are_spent_until_none_is_left() -> None:
    spent = budget(100)
    assert [length(spent.spend(sequence(n))) for n in (60, 60, 1)] == [60, 40, 0]
    assert spent.tokens == 0


def test_a_part_is_left_to_others_by_all_together() -> None:
    spent = budget(160)
    assert [length(spent.spend(sequence(n), kept_back=1 / 16)) for n in (100, 100, 100)] == [100, 50, 0]
    assert length(spent.spend(sequence(300))) == 10


def test_a_prompt_is_cut_where_the_time_ends() -> None:
    spent = budget()
    assert length(spent.spend(sequence(200), limit_seconds=0.06)) == pytest.approx(50, abs=4)
    assert spent.spend(sequence(200), limit_seconds=0.06) is None, "the step is as long as it may be"
    assert length(spent.spend(sequence(200), limit_seconds=0.1)) == pytest.approx(40, abs=4), "another may have more"


def test_decodes_fill_the_time_and_no_more() -> None:
    spent = budget()
    decodes = [spent.spend(sequence(20, 19), limit_seconds=0.03) for _ in range(40)]
    assert sum(map(length, decodes)) == pytest.approx(20, abs=4)
    assert all(span is None for span in decodes[30:])


def test_what_isnt_worth_its_place_waits() -> None:
    assert budget().spend(sequence(200), limit_seconds=0.01 + 0.001 * LEAST_CHUNK / 2) is None
    assert length(budget().spend(sequence(5, 0), limit_seconds=0.018)) == 5, "an end is worth it"


def test_one_that_must_be_in_the_step_has_a_chunk_at_least() -> None:
    assert length(budget().spend(sequence(200), limit_seconds=0.0, must=True)) == LEAST_CHUNK
    assert length(budget().spend(sequence(20, 19), limit_seconds=0.0, must=True)) == 1
    assert length(budget(4).spend(sequence(200), limit_seconds=0.0, must=True)) == 4


@pytest.mark.parametrize(("limit_seconds", "expected"), [(0.005, 0), (0.02, 200)])
def test_tokens_that_seem_to_cost_nothing(limit_seconds: float, expected: int) -> None:
    step_time = StepTime()
    for num_tokens in (256, 64, 16, 1) * 4:
        step_time.record(Load(num_tokens, 1, num_tokens), 10e-3)
    assert step_time.token_seconds() == 0.0
    assert length(Budget(256, 256, step_time).spend(sequence(200), limit_seconds=limit_seconds)) == expected
