"""The index against a naive search of the whole text."""

import hypothesis.strategies as st
from hypothesis import given, settings

from services.worker.engine.speculation.suffix_index import GRAM, MAX_CANDIDATES, MAX_MATCH, Match, SuffixIndex, continuation

TEXT = st.lists(st.integers(0, 3), max_size=120) | st.lists(st.integers(0, 40), max_size=200)


def naive(tokens: list[int]) -> Match | None:
    """Every place, the latest first; of the first MAX_CANDIDATES that end in the last two tokens, or else in the last, the longest."""
    end = len(tokens)
    for gram in (GRAM, 1):
        places = [f for f in range(end - 1, gram - 1, -1) if end >= gram and tokens[f - gram : f] == tokens[end - gram :]]
        if places:
            break
    else:
        return None
    lengths = {}
    for follower in places[:MAX_CANDIDATES]:
        length = 0
        while length < min(MAX_MATCH, follower) and tokens[follower - length - 1] == tokens[end - length - 1]:
            length += 1
        lengths[follower] = length
    longest = max(lengths.values())
    first, *others = [follower for follower in lengths if lengths[follower] == longest]
    support = 1 if not others else 2 if tokens[others[0]] == tokens[first] else 0
    return Match(first, longest, support)


@given(TEXT, st.data())
@settings(max_examples=300, deadline=None)
def test_longest_and_latest_however_the_text_came(tokens: list[int], data: st.DataObject) -> None:
    index, known = SuffixIndex(), 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        index.extend(tokens[:known])
        assert index.longest(tokens[:known]) == naive(tokens[:known])


def test_nothing_is_found_in_what_never_came_twice() -> None:
    index = SuffixIndex()
    for length in range(30):
        index.extend(range(length))
        assert index.longest(range(length)) is None


def test_a_long_repetition_is_found_where_it_goes_on() -> None:
    text = [*range(100), *range(60)]
    index = SuffixIndex()
    index.extend(text)
    assert index.longest(text) == Match(60, MAX_MATCH, 1)
    assert continuation(text, 60, 4) == (60, 61, 62, 63)


def test_places_that_disagree_support_nothing() -> None:
    for text, support in ([7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2], 2), ([7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 0), ([7, 1, 2, 3, 4, 9, 1, 2], 1):
        index = SuffixIndex()
        index.extend(text)
        match = index.longest(text)
        assert match is not None
        assert (match.length, match.support) == (2, support)


def test_what_goes_round_goes_on_going_round() -> None:
    text = [9, 1, 2, 3, 1, 2, 3, 1]
    index = SuffixIndex()
    index.extend(text)
    match = index.longest(text)
    assert match is not None
    assert continuation(text, match.follower, 7) == (2, 3, 1, 2, 3, 1, 2)
