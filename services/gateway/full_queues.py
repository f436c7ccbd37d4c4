"""What schedulers said last of full queues, so that a flood is refused here, before its prompts are tokenised. Decides nothing for long."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.errors import StatusError, unavailable

WORD_SECONDS = 1.0
"""So long a scheduler's word counts."""
PROBES = 4
"""Calls for one model that ask all the same while it does: the first of them that gets a place ends it."""


@dataclass(frozen=True)
class _Word:
    latency_class: int
    """The most urgent that was refused; less urgent ones would be, too."""
    message: str
    retry_seconds: float
    until: float


class FullQueues:
    """By model. Requests that have a place, or a worker, are never asked about."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._words: dict[str, _Word] = {}
        self._num_asking: Counter[str] = Counter()

    def check(self, model: str, latency_class: int) -> None:
        """UNAVAILABLE + RetryInfo where a scheduler has just refused such a request and enough others ask whether that still holds."""
        word = self._words.get(model)
        if word is None or latency_class < word.latency_class or self._num_asking[model] < PROBES:
            return
        if self._clock() >= word.until:
            del self._words[model]
            return
        spread = 0.85 + 0.3 * random.random()  # noqa: S311  # they shall not all come back at once
        raise unavailable(word.message, word.retry_seconds * spread, reason="QUEUE_FULL")

    @contextmanager
    def asking(self, model: str, latency_class: int) -> Iterator[Callable[[], None]]:
        """A call that asks for a place, until it has one, which the function given tells, or is refused. Raises as check."""
        self.check(model, latency_class)
        self._num_asking[model] += 1
        is_asking = True

        def ended() -> None:
            nonlocal is_asking
            if is_asking:
                is_asking = False
                self._num_asking -= Counter([model])  # in-place: what comes to 0 goes

        def queued() -> None:
            ended()
            word = self._words.get(model)
            if word is not None and latency_class >= word.latency_class:
                del self._words[model]

        try:
            yield queued
        except StatusError as error:
            if error.reason == "QUEUE_FULL":
                self._heard(model, latency_class, error)
            raise
        finally:
            ended()

    def _heard(self, model: str, latency_class: int, error: StatusError) -> None:
        now, word = self._clock(), self._words.get(model)
        if word is not None and now < word.until:
            latency_class = min(latency_class, word.latency_class)
        self._words[model] = _Word(latency_class, error.message, error.retry_after_seconds or 1.0, now + WORD_SECONDS)
