"""The two drafters by themselves."""

import itertools

import pytest
import torch

from services.worker.engine.batch import Batch, SpanResult
from services.worker.engine.request import EngineRequest, SequenceError
from services.worker.engine.sequence import RequestState, Sequence
from services.worker.engine.speculation.model_drafter import ModelDrafter
from services.worker.engine.speculation.suffix_drafter import SuffixDrafter


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(RequestState(EngineRequest("r", tokens), 0, b"", []), 0, list(tokens), len(tokens), 100, frozenset(), [])


class Counter:
    """A runner whose next token is the last one's successor; a sequence that gets to 13 fails there."""

    def __init__(self, *, tells: bool = False) -> None:
        self.passes: list[list[tuple[int, list[int]]]] = []  # (start, tokens) of each span
        self._tells = tells

    def execute(self, batch: Batch) -> list[SpanResult]:
        self.passes.append([(span.start, span.token_ids) for span in batch.spans])
        return [self._result(span.token_ids[-1] + 1) for span in batch.spans]

    def _result(self, token: int) -> SpanResult:
        if token == 13:
            return SpanResult(error=SequenceError("r", 0, "bad luck"))
        return SpanResult([token], probabilities=torch.full((1, 4), float(token)) if self._tells else None)


def test_a_model_computes_a_token_per_pass_for_those_that_want_one() -> None:
    runner, ticks = Counter(tells=True), itertools.count(0, 3)
    drafter = ModelDrafter(runner, clock=lambda: next(ticks))
    assert drafter.pass_seconds == 0
    short, long, failing = sequence([1, 2]), sequence([5, 6, 7]), sequence([11])
    drafts = drafter.draft([(short, 1), (long, 3), (failing, 3)])
    assert [draft.token_ids for draft in drafts] == [(3,), (8, 9, 10), (12,)]
    assert runner.passes == [[(1, [2]), (2, [7]), (0, [11])], [(3, [8]), (1, [12])], [(4, [9])]]
    probabilities = drafts[1].probabilities
    assert probabilities is not None
    assert probabilities[:, 0].tolist() == [8, 9, 10]
    assert drafter.pass_seconds == pytest.approx(3)


def test_a_model_that_fails_at_once_drafts_nothing() -> None:
    drafter = ModelDrafter(Counter(), clock=lambda: 0.0)
    (draft,) = drafter.draft([(sequence([12]), 4)])
    assert (draft.token_ids, draft.probabilities) == ((), None)


def test_a_lookup_is_the_surer_the_longer_its_match() -> None:
    grades = []
    for length in (1, 2, 3, 5, 9, 17, 30):
        motif = list(range(100, 100 + length))
        drafter, text = SuffixDrafter(), sequence([1, *motif, 7, 8, 9, 2, *motif])
        outlook = drafter.outlook(text)
        assert outlook is not None
        assert outlook.token_id == 7
        assert drafter.draft([(text, 3)])[0].token_ids == (7, 8, 9)
        grades.append([outlook.grade(depth) for depth in (0, 1, 30)])
    assert grades == [[1, 2, 6], [2, 3, 6], [3, 3, 6], [4, 4, 6], [5, 5, 6], [6, 6, 6], [6, 6, 6]]
    assert len(SuffixDrafter().prior) == 9


def test_a_lookup_is_the_surer_the_more_often_it_was_right_and_doubts_what_disagrees() -> None:
    again = SuffixDrafter().outlook(sequence([1, 2, 7, 3, 1, 2, 7, 4, 1, 2]))
    disagreeing = SuffixDrafter().outlook(sequence([1, 2, 7, 3, 1, 2, 8, 4, 1, 2]))
    assert again is not None
    assert disagreeing is not None
    assert (again.token_id, again.grade(0), again.grade(1)) == (7, 7, 8)
    assert (disagreeing.token_id, disagreeing.grade(0)) == (8, 0)


def test_a_lookup_says_nothing_of_what_is_new_and_forgets_what_has_ended() -> None:
    drafter, text = SuffixDrafter(), sequence([1, 2, 3])
    assert drafter.outlook(text) is None
    text.tokens += [1, 2]
    assert drafter.outlook(text) is not None
    drafter.forget(text)
    drafter.forget(text)
    with pytest.raises(KeyError):
        drafter.draft([(text, 1)])
