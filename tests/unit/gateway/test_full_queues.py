"""When a flood is refused before it reaches a scheduler, and when not."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from services.common.errors import StatusError, unavailable
from services.gateway.full_queues import PROBES, WORD_SECONDS, FullQueues

REALTIME, STANDARD, BATCH = 1, 2, 3


class _Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.queues = FullQueues(lambda: self.now)

    def refuse(self, latency_class: int, model: str = "m") -> None:
        """A scheduler says that the queue is full."""
        with pytest.raises(StatusError), self.queues.asking(model, latency_class):
            raise unavailable("full", 4.0, reason="QUEUE_FULL")

    def is_full(self, latency_class: int, model: str = "m") -> bool:
        try:
            self.queues.check(model, latency_class)
        except StatusError as error:
            return (error.message, error.reason) == ("full", "QUEUE_FULL") and 3.4 <= (error.retry_after_seconds or 0) <= 4.6
        return False


@pytest.fixture
def bench() -> _Bench:
    return _Bench()


@pytest.fixture
def probes(bench: _Bench) -> Iterator[ExitStack]:
    """As many realtime calls as may ask."""
    with ExitStack() as stack:
        for _ in range(PROBES):
            stack.enter_context(bench.queues.asking("m", REALTIME))
        yield stack


def test_nobody_is_refused_without_a_schedulers_word(bench: _Bench, probes: ExitStack) -> None:
    assert not bench.is_full(BATCH)


def test_some_ask_all_the_same(bench: _Bench) -> None:
    bench.refuse(BATCH)
    assert not bench.is_full(BATCH)


def test_a_word_is_for_one_model_and_for_what_is_no_more_urgent(bench: _Bench, probes: ExitStack) -> None:
    bench.refuse(STANDARD, "other")
    assert not bench.is_full(STANDARD)
    with pytest.raises(StatusError), bench.queues.asking("m", STANDARD):
        raise unavailable("full", 4.0, reason="QUEUE_FULL")
    assert [bench.is_full(latency_class) for latency_class in (REALTIME, STANDARD, BATCH)] == [False, True, True]


def test_another_refusal_is_no_word(bench: _Bench, probes: ExitStack) -> None:
    with pytest.raises(StatusError), bench.queues.asking("m", BATCH):
        raise unavailable("none", 4.0, reason="NO_WORKER")
    assert not bench.is_full(BATCH)


def test_a_word_is_soon_old(bench: _Bench, probes: ExitStack) -> None:
    bench.refuse(BATCH)
    bench.now = WORD_SECONDS * 0.99
    assert bench.is_full(BATCH)
    bench.now = WORD_SECONDS
    assert not bench.is_full(BATCH)


def test_a_place_for_one_ends_the_word_for_all_that_are_as_urgent(bench: _Bench) -> None:
    bench.refuse(BATCH)
    with ExitStack() as stack:
        asking = [stack.enter_context(bench.queues.asking("m", latency_class)) for latency_class in (BATCH, *[REALTIME] * PROBES)]
        asking[1]()
        assert bench.is_full(BATCH), "a realtime ticket takes a batch ticket's place"
        asking[0]()
        assert not bench.is_full(BATCH)


def test_who_waits_asks_no_more(bench: _Bench) -> None:
    bench.refuse(BATCH)
    with ExitStack() as stack:
        for _ in range(PROBES):
            stack.enter_context(bench.queues.asking("m", REALTIME))()
        assert not bench.is_full(BATCH)
