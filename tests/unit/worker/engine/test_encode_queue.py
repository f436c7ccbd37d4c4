"""Which inputs a step takes: classes first, shares within a class, no class left out for ever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.encode_queue import FLOOR_STEPS, EncodeQueue, EncodeRequest, check
from services.worker.engine.request import InvalidRequest, RequestTooLarge

REALTIME, STANDARD, BATCH = 1, 2, 3


def request(name: str, *lengths: int, latency_class: int = STANDARD) -> EncodeRequest:
    return EncodeRequest(name, [[1] * length for length in lengths], latency_class)


def queue_of(*requests: EncodeRequest) -> EncodeQueue:
    queue = EncodeQueue()
    for one in requests:
        queue.add(one)
    return queue


def names(queue: EncodeQueue, max_tokens: int) -> list[str]:
    return [pick.request.request_id for pick in queue.choose(max_tokens)]


def test_a_step_takes_as_many_inputs_as_fit_short_ones_first() -> None:
    queue = queue_of(request("a", 5, 2, 4, 1))
    (first,) = queue.choose(8)
    assert (first.indexes, first.is_last) == ([3, 1, 2], False)
    (last,) = queue.choose(8)
    assert (last.indexes, last.is_last) == ([0], True)
    assert queue.choose(8) == []
    assert len(queue) == 0


def test_an_input_longer_than_a_step_goes_alone() -> None:
    queue = queue_of(request("a", 20), request("b", 3))
    assert names(queue, 8) == ["b"]
    assert names(queue, 8) == ["a"]


def test_a_more_urgent_class_goes_first_and_leaves_the_rest() -> None:
    queue = queue_of(request("batch", 3, 3, 3, latency_class=BATCH), request("realtime", 4, 4, latency_class=REALTIME))
    assert names(queue, 8) == ["realtime"]
    assert names(queue, 8) == ["batch"]
    queue.add(request("realtime", 4, latency_class=REALTIME))
    assert names(queue, 8) == ["realtime", "batch"]


def test_a_small_request_is_not_kept_by_a_large_one_before_it() -> None:
    queue = queue_of(request("large", *[4] * 100), request("small", 4, 4))
    picks = queue.choose(16)
    assert {pick.request.request_id: len(pick.indexes) for pick in picks} == {"large": 2, "small": 2}


def test_what_one_cannot_use_of_its_share_another_gets() -> None:
    queue = queue_of(request("small", 1), request("large", *[4] * 100))
    assert [len(pick.indexes) for pick in queue.choose(17)] == [1, 4]


def test_those_with_too_small_a_share_take_turns() -> None:
    queue = queue_of(*(request(name, *[8] * 5) for name in "abc"))
    counts = Counter(name for _ in range(6) for name in names(queue, 10))
    assert counts == {"a": 2, "b": 2, "c": 2}


def test_a_class_is_not_left_out_for_ever() -> None:
    queue = queue_of(request("batch", 8, latency_class=BATCH))
    steps = 0
    while True:
        queue.add(request(f"standard {steps}", 8))
        steps += 1
        if "batch" in names(queue, 8):
            break
    assert steps == FLOOR_STEPS + 1


def test_what_is_aborted_is_taken_no_more() -> None:
    queue = queue_of(request("a", 4, 4), request("b", 4, 4))
    queue.choose(8)
    queue.abort("a")
    queue.abort("a")
    assert names(queue, 100) == ["b"]
    assert len(queue) == 0


def test_progress_is_the_tokens_taken() -> None:
    queue = queue_of(request("a", 4, 4, 4))
    assert (queue.progress(), queue.num_waiting) == ([("a", 0)], 1)
    queue.choose(8)
    assert (queue.progress(), queue.num_waiting) == ([("a", 8)], 0)


calls = st.lists(st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.sampled_from([1, 2, 3])), min_size=1, max_size=6)


@given(calls, st.integers(1, 30))
def test_every_input_is_taken_once_and_no_step_is_too_large(requests: list[tuple[list[int], int]], max_tokens: int) -> None:
    queue = queue_of(*(request(str(i), *lengths, latency_class=level) for i, (lengths, level) in enumerate(requests)))
    taken: Counter[tuple[str, int]] = Counter()
    ended: list[str] = []
    while len(queue):
        picks = queue.choose(max_tokens)
        queue.check_integrity()
        lengths = [len(pick.request.inputs[index]) for pick in picks for index in pick.indexes]
        assert lengths
        assert sum(lengths) <= max_tokens or len(lengths) == 1
        taken.update((pick.request.request_id, index) for pick in picks for index in pick.indexes)
        ended += [pick.request.request_id for pick in picks if pick.is_last]
    assert taken == Counter((str(i), index) for i, (lengths, _) in enumerate(requests) for index in range(len(lengths)))
    assert sorted(ended) == sorted(str(i) for i in range(len(requests)))


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        (EncodeRequest("a", [[1]], 0), InvalidRequest, "latency_class is 0"),
        (EncodeRequest("a", []), InvalidRequest, "inputs is empty"),
        (EncodeRequest("a", [[1], []]), InvalidRequest, r"inputs\[1\] is empty"),
        (EncodeRequest("a", [[1], [1] * 9]), RequestTooLarge, r"inputs\[1\] has 9 tokens; this encoder takes at most 8"),
        (EncodeRequest("a", [[1, 50]]), InvalidRequest, r"inputs\[0\] holds 1 .. 50; token ids must be from 0 to 49"),
        (EncodeRequest("a", [[-1]]), InvalidRequest, "token ids must be from 0"),
        (EncodeRequest("a", [[1]], dimensions=0), InvalidRequest, "dimensions is 0; it must be from 1 to 16"),
        (EncodeRequest("a", [[1]], dimensions=17), InvalidRequest, "dimensions is 17"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(broken: EncodeRequest, error: type[ValueError], words: str) -> None:
    with pytest.raises(error, match=words):
        check(broken, vocab_size=50, max_input_len=8, hidden_size=16)
