"""What schedulers have answered, kept for some seconds: one question at a time per key, the last good answer while nobody answers.

A flood of unknown keys doesn't become a flood of questions. Knows nothing of what is asked.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.errors import Code, StatusError, unavailable

Key = TypeVar("Key", bytes, str)
Value = TypeVar("Value")
Kept = TypeVar("Kept")

# These say something of the key. Any other failure is the answerer's own.
_NO = frozenset({Code.UNAUTHENTICATED, Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT})


@dataclass(frozen=True)
class Keeping:
    """How long answers count, in seconds, and how many are kept."""

    good_seconds: float = 5.0
    refused_seconds: float = 1.0
    away_seconds: float = 300.0  # a good one, from when it was given, while nobody answers
    retry_seconds: float = 1.0  # between questions while nobody answers
    most: int = 10_000  # good ones, and refusals: the longest unused go
    new_per_second: float = 200.0  # questions about keys that have no good answer; so many at once, too


@dataclass
class _Good(Generic[Value]):
    value: Value
    answered_at: float
    due_at: float


class Answers(Generic[Key, Value]):
    """Asks `ask` what isn't known, and forgets what is old."""

    def __init__(self, ask: Callable[[Key], Awaitable[Value]], keeping: Keeping, clock: Callable[[], float] = time.monotonic) -> None:
        """`ask` raises StatusError: UNAUTHENTICATED, NOT_FOUND, PERMISSION_DENIED and INVALID_ARGUMENT are answers, too."""
        self._ask: Callable[[Key], Awaitable[Value]] = ask
        self._keeping = keeping
        self._clock = clock
        self._good: OrderedDict[Key, _Good[Value]] = OrderedDict()
        self._refused: OrderedDict[Key, tuple[StatusError, float]] = OrderedDict()  # the refusal, and until when it counts
        self._asking: dict[Key, asyncio.Task[Value | StatusError]] = {}
        self._allowance = keeping.new_per_second
        self._allowed_at = clock()

    async def get(self, key: Key) -> Value:
        """The answer. Raises the refusal; UNAVAILABLE where nobody answers and none is kept, or too many ask for what nobody knows."""
        now = self._clock()
        good = self._good.get(key)
        if good is not None and now < good.due_at:
            self._good.move_to_end(key)
            return good.value
        refusal, until = self._refused.get(key, (None, 0.0))
        if refusal is not None and now < until:
            raise refusal.with_traceback(None)
        task = self._asking.get(key)
        if task is None:
            if good is None:
                self._spend(now)
            task = self._asking[key] = asyncio.create_task(self._learn(key))
        answer = await asyncio.shield(task)  # others may wait for it as well
        if isinstance(answer, StatusError):
            raise answer.with_traceback(None)
        return answer

    def expire(self) -> None:
        """Something has changed: what is kept is asked for again before it is given out, and given out as it is while nobody answers."""
        now = self._clock()
        for good in self._good.values():
            good.due_at = min(good.due_at, now)
        self._refused.clear()

    def _spend(self, now: float) -> None:
        most = self._keeping.new_per_second
        self._allowance = min(most, self._allowance + (now - self._allowed_at) * most)
        self._allowed_at = now
        if self._allowance < 1:
            raise unavailable("too many unknown names are being asked for: try again", 1.0, reason="TOO_MANY_UNKNOWN")
        self._allowance -= 1

    async def _learn(self, key: Key) -> Value | StatusError:
        try:
            value = await self._ask(key)
        except StatusError as error:
            return self._refusal(key, error)
        finally:
            del self._asking[key]
        now = self._clock()
        self._refused.pop(key, None)
        self._keep(self._good, key, _Good(value, now, now + self._keeping.good_seconds))
        return value

    def _refusal(self, key: Key, error: StatusError) -> Value | StatusError:
        """The error, unless it says nothing of the key and there is an answer that still counts."""
        now = self._clock()
        if error.code in _NO:
            self._good.pop(key, None)
            self._keep(self._refused, key, (error, now + self._keeping.refused_seconds))
            return error
        good = self._good.get(key)
        if good is None or now - good.answered_at > self._keeping.away_seconds:
            return error
        good.due_at = now + self._keeping.retry_seconds
        return good.value

    def _keep(self, where: OrderedDict[Key, Kept], key: Key, what: Kept) -> None:
        where[key] = what
        where.move_to_end(key)
        if len(where) > self._keeping.most:
            where.popitem(last=False)
