"""Copying a block against computing its tokens."""

import pytest

from services.worker.engine.costs import LONG_SPAN, Costs


@pytest.mark.parametrize(("copy_seconds", "pays"), [(0.15, True), (0.17, False)])  # 16 tokens at 0.01 seconds each
def test_a_block_comes_back_where_its_copy_is_faster(copy_seconds: float, pays: bool) -> None:
    costs = Costs()
    assert costs.copying_pays(16), "what was never measured is tried"
    costs.copy.record(10, 10 * copy_seconds)
    assert costs.copying_pays(16)
    costs.record_step([100], 1.0)
    assert costs.copying_pays(16) is pays


def test_only_steps_that_are_prompts_for_the_most_part_tell_what_a_prompts_token_costs() -> None:
    costs = Costs()
    costs.record_step([1] * 40, 9.0)  # decoding
    costs.record_step([8] * 4, 9.0)  # verifying
    costs.record_step([LONG_SPAN] + [1] * LONG_SPAN, 9.0)
    assert costs.prefill.per_unit is None
    costs.record_step([LONG_SPAN] + [1] * (LONG_SPAN - 1), LONG_SPAN * 2 - 1)
    assert costs.prefill.per_unit == 1.0


def test_one_hiccup_is_outweighed_by_what_follows() -> None:
    costs = Costs()
    costs.record_step([100], 1.0)
    costs.copy.record(1, 10.0)
    assert not costs.copying_pays(16)
    for _ in range(20):
        costs.copy.record(8, 0.08)
    assert costs.copying_pays(16)


def test_what_one_hiccup_ruled_out_is_tried_again() -> None:
    costs = Costs()
    costs.record_step([100], 1.0)
    costs.copy.record(1, 1.0)
    refusals = 0
    while not costs.swapping_pays(16):
        costs.copy.doubt()
        refusals += 1
    assert 20 <= refusals <= 30, "2.0 s is 12.5 times what computing takes: .9 ** 24 of it is less"
    costs.copy.record(8, 0.08)
    assert costs.swapping_pays(16)
