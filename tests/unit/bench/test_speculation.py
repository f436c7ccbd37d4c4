"""The speculation bench's figures from given times, and its prompts."""

import math

import pytest

from bench.speculation import Cell, figures
from bench.speculation_prompts import PROMPTS


def cell(*ratios: float, drafts: int = 100, accepted: int = 80) -> Cell:
    return Cell([math.log(ratio) for ratio in ratios], drafts, accepted, num_tokens=200)


def test_seven_sets_and_thirty_prompts_none_twice() -> None:
    assert list(PROMPTS) == ["quote", "rewrite", "code", "summarise", "json", "chat", "story"]
    texts = [text for texts in PROMPTS.values() for text in texts]
    assert len(texts) == len(set(texts)) >= 30


def test_speed_is_the_median_and_the_worst_is_a_lower_bound() -> None:
    cells = {("quote", 1): cell(3.0, 3.2, 9.0), ("chat", 1): cell(1.0, 1.0, 1.0), ("chat", 64): cell(0.9, 1.0, 1.1)}
    found = {str(figure["figure"]): figure for figure in figures(cells)}
    assert found["spec_quote"] == {"figure": "spec_quote", "value": 3.2, "unit": "x", "target": 3.0, "holds": True}
    assert found["spec_acceptance_chat"]["value"] == 0.8
    assert found["spec_accepted_share_chat"]["value"] == 0.4
    # By hand: logs -.10536, 0, .09531; mean -.00335, deviation .10037, t(2) 2.92.
    assert found["spec_lower_chat_c64"]["value"] == pytest.approx(math.exp(-0.00335 - 2.92 * 0.10037 / math.sqrt(3)), abs=0.001)
    assert found["spec_worst"]["value"] == found["spec_lower_chat_c64"]["value"]
    assert found["spec_worst"]["holds"] is False


def test_one_round_gives_no_bound() -> None:
    assert "spec_worst" not in {figure["figure"] for figure in figures({("json", 4): cell(2.0)})}
