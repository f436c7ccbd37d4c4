"""What became of a request in the engine: its events, and the phases that its time went into. Pure: the time is passed in.

Kept up where a sequence changes its state, never per token; bounded, however often it is preempted.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

MAX_EVENTS = 64
FEW_EVENTS = 32  # from here on chunks of a prompt are joined
KEPT_FOR_ENDS = 16  # events that only ends may take


class Kind(IntEnum):
    """As worker's callers know them."""

    ADMITTED = 1
    PREFILL = 2
    FIRST_TOKEN = 3
    PREEMPTED_BY_CLASS = 4
    PREEMPTED_BY_CAPACITY = 5
    SWAPPED = 6
    RECOMPUTED = 7
    RESUMED = 8
    ENDED = 9


class Phase(IntEnum):
    """Of a sequence; a request is in the greatest that any of its sequences is in."""

    WAITING = 0
    PREEMPTED = 1  # from giving way until it has got on
    PREFILL = 2
    DECODE = 3


class Event(NamedTuple):
    """Times by the engine's clock, in seconds. See explain.proto for the numbers."""

    kind: Kind
    at: float
    choice_index: int
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A timeline as it was at one moment. `seconds` by Phase, from `began` on."""

    began: float
    events: tuple[Event, ...]
    seconds: tuple[float, ...]
    num_dropped_events: int = 0


@dataclass(eq=False)
class Timeline:
    """One request's. `num_in`: how many of its live sequences are in each phase."""

    began: float | None = None  # when it was first looked at; its sequences wait from then on
    events: list[Event] = field(default_factory=list)
    num_dropped_events: int = 0
    num_in: list[int] = field(default_factory=lambda: [0] * len(Phase))
    _seconds: list[float] = field(default_factory=lambda: [0.0] * len(Phase))
    _since: float = 0.0

    def begin(self, num_sequences: int, now: float) -> None:
        """So many sequences begin to wait."""
        self.began = self._since = now
        self.num_in[Phase.WAITING] = num_sequences

    def move(self, old: Phase, new: Phase | None, now: float) -> None:
        """One sequence goes from one phase into another; None: it has ended."""
        self._pass(now)
        self.num_in[old] -= 1
        if new is not None:
            self.num_in[new] += 1

    def note(self, event: Event) -> None:
        """Something has happened."""
        if event.kind is Kind.PREFILL and len(self.events) >= FEW_EVENTS and self._join(event):
            return
        if len(self.events) < (MAX_EVENTS if event.kind is Kind.ENDED else MAX_EVENTS - KEPT_FOR_ENDS):
            self.events.append(event)
        else:
            self.num_dropped_events += 1

    def snapshot(self, now: float) -> Snapshot:
        """As it is; `began` must have been told."""
        assert self.began is not None, "a request that the engine hasn't looked at has no timeline"
        self._pass(now)
        return Snapshot(self.began, tuple(self.events), tuple(self._seconds), self.num_dropped_events)

    def _pass(self, now: float) -> None:
        """The time until now belongs to the present phase."""
        phase = next((phase for phase in reversed(Phase) if self.num_in[phase]), None)
        if phase is not None:
            self._seconds[phase] += now - self._since
        self._since = now

    def _join(self, event: Event) -> bool:
        """Adds a chunk to the one before it, where that is the last that happened."""
        last = self.events[-1]
        if (last.kind, last.choice_index) != (Kind.PREFILL, event.choice_index):
            return False
        chunks, tokens = last.num_chunks + event.num_chunks, last.num_tokens + event.num_tokens
        self.events[-1] = last._replace(num_tokens=tokens, num_chunks=chunks)
        return True
