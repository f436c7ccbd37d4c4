"""One trial of a row: what it did, whether the fault was felt, and what became of the requests."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bench.chaos.fleet import Fleet
from bench.chaos.traffic import RETRIES, Flow, Stream, Traffic


@dataclass
class Trial:
    """A row's function acts through it. Every stream of `flow` must end; `survive`: well, with all tokens."""

    fleet: Fleet
    traffic: Traffic
    number: int
    rng: random.Random
    surviving: list[Stream] = field(default_factory=list)
    others: list[Stream] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    leaked: dict[str, float] = field(default_factory=dict)

    def flow(self, planned: Sequence[Stream], *, survive: bool = True) -> Flow:
        """Starts streams."""
        (self.surviving if survive else self.others).extend(planned)
        for stream in planned:
            stream.retries = RETRIES if survive else 0
        return Flow(self.traffic, planned)

    def prove(self, what: str, felt: object) -> None:
        """The fault was felt; else the trial counts for nothing."""
        if not felt:
            self.unproven.append(what)

    def expect(self, what: str, holds: object) -> None:
        """Something that the row promises beyond its streams' ends."""
        if not holds:
            self.broken.append(what)

    @property
    def lost(self) -> list[Stream]:
        """Without an end; or ended in an error where that was not to be."""
        return [stream for stream in self.surviving if not stream.succeeded] + [stream for stream in self.others if stream.lost]

    @property
    def num_doubled(self) -> int:
        """Tokens that came twice, and second ends."""
        return sum(stream.num_doubled + max(0, stream.num_ends - 1) for stream in (*self.surviving, *self.others))

    @property
    def wrong(self) -> list[Stream]:
        """Whose tokens an undisturbed worker would not have said."""
        return [stream for stream in (*self.surviving, *self.others) if stream.wrong]

    @property
    def num_refused(self) -> int:
        """Times that a request was told to come back, and did."""
        return sum(stream.num_refused for stream in self.surviving)

    @property
    def gaps(self) -> list[float]:
        """The longest silence of each stream that survived, in seconds."""
        return [stream.longest_gap for stream in self.surviving if stream.succeeded]


Act = Callable[[Trial], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """A line of the fault matrix. `trials`: of `make chaos`; `long`: of `make chaos-long`; `has_gap`: gaps have a target."""

    name: str
    what: str
    act: Act
    trials: int = 3
    long: int = 0
    has_gap: bool = False


async def at_random(trial: Trial, least: float, most: float) -> None:
    """Some time passes."""
    await asyncio.sleep(trial.rng.uniform(least, most))
