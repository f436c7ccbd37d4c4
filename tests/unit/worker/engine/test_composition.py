"""Who gets room first and who gives way, against the exact knapsack and the cases where plain weights go wrong."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.worker.engine.composition import DOUBLING_SECONDS, FLOOR_PARTS, WEIGHTS, Shares, in_order, is_due, victims, weight
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import MAX_PREEMPTIONS, RequestState, Sequence, SequenceState

REALTIME, STANDARD, BATCH = 1, 2, 3
NOW = 1000.0
DUE_SECONDS = 30.0


def sequence(latency_class: int, blocks: int = 1, *, waited: float = 0.0, arrival: int = 0, left: int = 100) -> Sequence:
    """One that waits for so many blocks of one token, or holds them once it is `running`."""
    group = RequestState(EngineRequest(f"{arrival}", [0] * blocks, latency_class=latency_class), b"", [], arrival=arrival)
    return Sequence(group, 0, [0] * blocks, blocks, left, frozenset(), [], waiting_since=NOW - waited)


def running(latency_class: int, blocks: int = 1, *, arrival: int = 0, left: int = 100, waited: float = 0.0) -> Sequence:
    made = sequence(latency_class, blocks, arrival=arrival, left=left)
    made.state, made.block_table, made.num_computed_tokens = SequenceState.RUNNING, list(range(blocks)), blocks - 1
    made.waiting_since, made.waited_seconds = None, waited
    return made


def by_order(sequences: list[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda s: s.order)


def order(waiting: list[Sequence], shares: Shares | None = None, present: list[Sequence] | None = None) -> list[Sequence]:
    owed, others = in_order(by_order(waiting), present or [], shares or Shares.of([], 1, 1), lambda s: s.num_tokens, NOW)
    return owed + others


def chosen(waiting: list[Sequence], room: int) -> list[Sequence]:
    """What fits, in order."""
    taken = []
    for candidate in order(waiting):
        if candidate.num_tokens <= room:
            room -= candidate.num_tokens
            taken.append(candidate)
    return taken


def best(items: list[tuple[float, int]], room: int) -> float:
    """The exact knapsack: most weight in so many blocks."""
    value = [0.0] * (room + 1)
    for item_weight, blocks in items:
        for left in range(room, blocks - 1, -1):
            value[left] = max(value[left], value[left - blocks] + item_weight)
    return value[room]


_SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=14)


@given(_SIZES, st.integers(1, 60))
def test_equally_old_ones_of_a_class_are_the_exact_knapsack(sizes: list[int], room: int) -> None:
    waiting = [sequence(STANDARD, size, arrival=index) for index, size in enumerate(sizes)]
    assert len(chosen(waiting, room)) == best([(1.0, size) for size in sizes], room)


@given(st.lists(st.tuples(st.integers(1, 12), st.floats(0, 60)), min_size=1, max_size=14), st.integers(1, 60))
def test_with_ages_the_greedy_choice_lacks_one_sequence_at_most(items: list[tuple[int, float]], room: int) -> None:
    waiting = [sequence(BATCH, size, waited=waited, arrival=index) for index, (size, waited) in enumerate(items)]
    weights = [weight(s, NOW) for s in waiting]
    value = sum(weight(s, NOW) for s in chosen(waiting, room))
    assert value >= best([(w, s.num_tokens) for w, s in zip(weights, waiting, strict=True)], room) - max(weights) - 1e-9


@given(st.dictionaries(st.sampled_from([1, 2, 3]), _SIZES, min_size=1), st.integers(1, 60))
def test_a_class_gets_as_much_as_without_those_below(sizes: dict[int, list[int]], room: int) -> None:
    waiting = [sequence(c, size, arrival=index) for c in sizes for index, size in enumerate(sizes[c])]
    taken = chosen(waiting, room)
    for latency_class in sorted(sizes):
        mine = [s.num_tokens for s in taken if s.latency_class == latency_class]
        assert len(mine) == best([(1.0, size) for size in sizes[latency_class]], room)
        room -= sum(mine)


def test_a_hundred_and_one_small_batch_sequences_dont_outweigh_a_large_realtime_one() -> None:
    """By weight alone they would: 101 x .1 is more than 10."""
    waiting = [sequence(BATCH, arrival=index) for index in range(101)] + [sequence(REALTIME, 101, arrival=200)]
    assert sum(WEIGHTS[s.latency_class] for s in waiting if s.latency_class == BATCH) > WEIGHTS[REALTIME]
    assert [s.latency_class for s in chosen(waiting, 101)] == [REALTIME]


def test_equals_keep_the_order_in_which_they_came() -> None:
    waiting = [sequence(STANDARD, 3, arrival=index, waited=5.0) for index in range(20)]
    assert order(waiting) == waiting


def test_whoever_was_begun_goes_before_newcomers_of_its_class() -> None:
    begun, small, urgent = sequence(BATCH, 50, arrival=1), sequence(BATCH, 1), sequence(REALTIME, 99)
    begun.num_preemptions = 1
    assert order([begun, small, urgent]) == [urgent, begun, small]


@settings(max_examples=60)
@given(st.integers(2, 1000), st.integers(1, 3))
def test_a_large_one_overtakes_fresh_small_ones_in_time(blocks: int, latency_class: int) -> None:
    """Its weight doubles: it goes first after as many doublings as its size has bits."""
    waited = DUE_SECONDS  # a class below realtime is due by then
    while order([sequence(latency_class, blocks, waited=waited), sequence(latency_class, arrival=1)])[0].num_tokens == 1:
        waited += 1.0
    assert waited <= max(DUE_SECONDS, DOUBLING_SECONDS * (blocks.bit_length() + 1) + 1)


# --- floors


def test_a_class_is_due_when_it_outweighs_a_fresh_realtime_sequence() -> None:
    assert not is_due(sequence(BATCH, waited=DUE_SECONDS - 1), NOW)
    assert is_due(sequence(BATCH, waited=DUE_SECONDS), NOW)
    assert is_due(sequence(STANDARD, waited=DUE_SECONDS / 2), NOW)
    assert not is_due(sequence(REALTIME, waited=1e6), NOW)


def test_the_first_of_a_class_that_is_due_goes_before_all_and_no_second_one() -> None:
    urgent, due, second = sequence(REALTIME), sequence(BATCH, 9, waited=DUE_SECONDS), sequence(BATCH, 9, waited=DUE_SECONDS, arrival=1)
    assert order([urgent, due, second]) == [due, urgent, second]
    assert order([urgent, due], present=[running(BATCH, waited=DUE_SECONDS)]) == [urgent, due]


@pytest.mark.parametrize(("held", "is_owed"), [(0, True), (1, True), (2, False)])
def test_a_class_below_its_floor_gets_room_first(held: int, is_owed: bool) -> None:
    """Two of 32 slots are each class's own."""
    present = [running(REALTIME, arrival=index) for index in range(30)] + [running(BATCH, arrival=index) for index in range(held)]
    shares = Shares.of(present, 2 * FLOOR_PARTS, 100 * FLOOR_PARTS)
    urgent, patient = sequence(REALTIME, arrival=99), sequence(BATCH, 3, arrival=98)
    assert order([urgent, patient], shares, present) == ([patient, urgent] if is_owed else [urgent, patient])
    assert order([urgent, sequence(BATCH, 101)], shares, present)[0] is urgent, "a floor of blocks isn't exceeded"


def chosen_victims(present: list[Sequence], latency_class: int, max_sequences: int = 1, num_blocks: int = 1) -> list[Sequence]:
    return victims(by_order(present), latency_class, Shares.of(present, max_sequences, num_blocks), NOW)


def test_lower_classes_give_way_the_lowest_and_youngest_first() -> None:
    a, b, c, d = running(BATCH, arrival=1), running(BATCH, arrival=4), running(STANDARD, arrival=3), running(REALTIME, arrival=9)
    assert chosen_victims([a, b, c, d], REALTIME) == [b, a, c]
    assert chosen_victims([a, b, c, d], STANDARD) == [b, a]
    assert chosen_victims([a, b, c, d], BATCH) == []


def test_some_never_give_way() -> None:
    ending, reserved, due, second = (running(BATCH, 3, arrival=index, left=100 if index else 2) for index in range(4))
    reserved.num_preemptions = MAX_PREEMPTIONS
    due.waited_seconds = second.waited_seconds = DUE_SECONDS
    assert chosen_victims([ending, reserved, due, second], REALTIME) == [second]
    ending.num_computed_tokens = 0  # its prompt is still to come: it isn't about to finish
    assert ending in chosen_victims([ending, reserved, due, second], REALTIME)


def test_a_class_keeps_its_floor() -> None:
    present = [running(BATCH, 2, arrival=index) for index in range(4)]
    assert chosen_victims(present, REALTIME, 2 * FLOOR_PARTS, 4 * FLOOR_PARTS) == present[:1:-1]
    assert len(chosen_victims(present, REALTIME, 2 * FLOOR_PARTS, 3 * FLOOR_PARTS)) == 3, "two slots hold more than three blocks"
