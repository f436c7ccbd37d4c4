"""Answers that are kept: how long, for whom, and what is asked meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.common.errors import Code, StatusError, unavailable
from services.gateway.answers import Answers, Keeping
from tests.fakes import Journal

KEEPING = Keeping(good_seconds=5, refused_seconds=1, away_seconds=60, retry_seconds=2, most=3, new_per_second=4)


class Clock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Source:
    """Answers with the key's text and a number, or fails as it is told."""

    def __init__(self) -> None:
        self.asked: Journal[str] = Journal()
        self.failure: StatusError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, key: str) -> str:
        self.asked.append(key)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return f"{key}{len(self.asked)}"


def make(keeping: Keeping = KEEPING) -> tuple[Answers[str, str], Source, Clock]:
    source, clock = Source(), Clock()
    return Answers(source.ask, keeping, clock), source, clock


async def refusal(asking: Awaitable[str]) -> Code:
    with pytest.raises(StatusError) as caught:
        await asking
    return caught.value.code


async def test_a_good_answer_counts_for_its_time() -> None:
    answers, source, clock = make()
    assert await answers.get("a") == "a1"
    clock.now += 4.9
    assert await answers.get("a") == "a1"
    clock.now += 0.2
    assert await answers.get("a") == "a2"
    assert source.asked == ["a", "a"]


async def test_many_who_ask_at_once_ask_once() -> None:
    answers, source, _ = make()
    source.gate.clear()
    tasks = [asyncio.create_task(answers.get("a")) for _ in range(50)]
    await source.asked.until_length(1)
    tasks[0].cancel()  # who asked first goes away, the others get the answer
    source.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert set(results[1:]) == {"a1"}
    assert source.asked == ["a"]


@pytest.mark.parametrize("code", [Code.UNAUTHENTICATED, Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT])
async def test_a_refusal_counts_for_its_time_and_ends_a_good_answer(code: Code) -> None:
    answers, source, clock = make()
    await answers.get("a")
    source.failure = StatusError(code, "no")
    clock.now += 5
    for _ in range(10):
        assert await refusal(answers.get("a")) is code
    assert len(source.asked) == 2
    source.failure = None
    clock.now += 1
    assert await answers.get("a") == "a3"


async def test_a_refusal_that_is_given_often_does_not_grow() -> None:
    answers, source, _ = make()
    source.failure = StatusError(Code.NOT_FOUND, "no")

    async def depth() -> int:
        with pytest.raises(StatusError) as caught:
            await answers.get("a")
        frames, trace = 0, caught.value.__traceback__
        while trace is not None:
            frames, trace = frames + 1, trace.tb_next
        return frames

    await depth()
    assert len({await depth() for _ in range(20)}) == 1


@pytest.mark.parametrize("failure", [unavailable("away"), StatusError(Code.INTERNAL, "broken"), StatusError(Code.UNIMPLEMENTED, "old")])
async def test_the_last_good_answer_outlives_those_who_gave_it_for_a_bounded_time(failure: StatusError) -> None:
    answers, source, clock = make()
    await answers.get("a")
    source.failure = failure
    clock.now += 30
    for _ in range(10):
        assert await answers.get("a") == "a1"
    assert len(source.asked) == 2, "while nobody answers, one question in two seconds is enough"
    clock.now += 2
    assert await answers.get("a") == "a1"
    assert len(source.asked) == 3
    assert await refusal(answers.get("b")) is failure.code
    clock.now += 29
    assert await refusal(answers.get("a")) is failure.code
    source.failure = None
    assert (await answers.get("a")).startswith("a")


async def test_a_flood_of_unknown_keys_is_no_flood_of_questions() -> None:
    answers, source, clock = make(Keeping(new_per_second=4, most=100))
    assert await answers.get("known") == "known1"
    source.failure = StatusError(Code.UNAUTHENTICATED, "no")
    codes = [await refusal(answers.get(f"k{number}")) for number in range(100)]
    assert codes[:3] == [Code.UNAUTHENTICATED] * 3
    assert set(codes[3:]) == {Code.UNAVAILABLE}
    assert len(source.asked) == 4
    source.failure = None
    clock.now += 5  # the known key is asked for anew, whatever the flood
    for number in range(100):
        if number < 4:
            await answers.get(f"n{number}")
        else:
            assert await refusal(answers.get(f"n{number}")) is Code.UNAVAILABLE
    assert await answers.get("known") == "known9"


async def test_what_is_kept_is_bounded_and_refusals_push_no_answer_out() -> None:
    answers, source, _ = make(Keeping(most=3))
    for key in ("a", "b", "c"):
        await answers.get(key)
    await answers.get("a")  # used last
    source.failure = StatusError(Code.NOT_FOUND, "no")
    for number in range(10):
        await refusal(answers.get(f"x{number}"))
    source.failure = None
    await answers.get("d")
    num_asked = len(source.asked)
    for key in ("a", "c", "d"):
        await answers.get(key)
    assert len(source.asked) == num_asked
    await answers.get("b")
    assert source.asked[-1] == "b"


async def test_what_the_source_breaks_on_is_no_answer() -> None:
    def break_(_: str) -> Awaitable[str]:
        raise ZeroDivisionError

    ask: Callable[[str], Awaitable[str]] = break_
    answers = Answers(ask, KEEPING)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await answers.get("a")
