"""The order of waiting tickets: class, then fairness between orgs, then arrival. Knows no worker.

A class offers the ticket that is next in it; the offer with the largest weight, doubling with the ticket's age, is first, and before it
a class that has had less than its floor share of late. Within a class the org is next that was given the fewest tokens for its weight.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which names a routing, which names tickets
    from services.scheduler.policy.rules import Rules


@dataclass(frozen=True)
class Ticket:
    """A waiting request, as far as placing it needs. `order` is given once, at the first arrival, and never changes."""

    request_id: str
    org: str
    latency_class: int
    model: str
    model_version: str
    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    order: int = 0
    num_delivered_tokens: int = 0
    excluded_workers: frozenset[str] = frozenset()
    awaited: tuple[tuple[str, str], ...] = ()
    """(worker, incarnation) of dead workers that must have said what they died with before it is placed."""
    asked_seconds: float = 0.0
    """Since its gateway asked, and named the workers that it can't reach."""
    waited_seconds: float = 0.0
    """Since it arrived first."""
    traceparent: str = field(default="", compare=False)
    """W3C trace context of the request; "" where it isn't traced."""
    block_hashes: str = ""
    """Names of the prompt's beginnings, each `hash_tokens` longer than the one before; 16 hex digits each, joined."""
    hash_tokens: int = 0
    region: str = ""
    """Of its gateway; "": anywhere."""


@dataclass(frozen=True)
class Fifo:
    """The first waiting tickets of one (model, class, org), in order of arrival; `cut` if more wait behind them.

    served: tokens that the org was given in this (model, class), divided by its weight.
    """

    tickets: Sequence[Ticket]
    served: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Turn:
    """A ticket whose turn it is. `first_of_all`: no ticket of any class may take the room that it waits for."""

    ticket: Ticket
    first_of_all: bool = False


def expected_output(ticket: Ticket, output_estimate: int) -> int:
    """Tokens that it will probably still generate, over all choices."""
    return min(ticket.n * output_estimate, max(0, ticket.n * ticket.max_tokens - ticket.num_delivered_tokens))


_Entry = tuple[float, int, str, Fifo, int]
"""Tokens served, order, request id (no two entries are equal up to here), the fifo and the ticket's index in it.

One index past its end, it stands for the next ticket behind a cut, of which is known only that it came later than the last.
"""


@dataclass
class _Line:
    """One (model, class): its orgs as a heap."""

    latency_class: int
    recent: list[float]
    entries: list[_Entry] = field(default_factory=list)

    def push(self, served: float, fifo: Fifo, index: int, *, by_arrival: bool) -> None:
        ticket = fifo.tickets[min(index, len(fifo.tickets) - 1)]
        heapq.heappush(self.entries, (0.0 if by_arrival else served, ticket.order, ticket.request_id, fifo, index))

    @property
    def next(self) -> Ticket:
        """The next ticket, or the last one known before it."""
        _, _, _, fifo, index = self.entries[0]
        return fifo.tickets[min(index, len(fifo.tickets) - 1)]


class Order:
    """Iterates over the tickets, and is told of each that was placed, as that changes who is next.

    recent: model -> tokens placed of it lately, by class 0 .. 3. Ends early when it is the turn of a ticket behind a cut.
    """

    def __init__(self, fifos: Iterable[Fifo], rules: "Rules", recent: Mapping[str, Sequence[float]] | None = None) -> None:
        self._rules = rules
        self._lines: dict[tuple[str, int], _Line] = {}
        self._placed = False
        shares = {model: list(tokens) for model, tokens in (recent or {}).items()}
        for fifo in fifos:
            if not fifo.tickets:
                continue
            model, latency_class = fifo.tickets[0].model, fifo.tickets[0].latency_class
            # By arrival alone there is one line, so nothing but the order of tickets is ever compared.
            name = ("", 0) if rules.fifo else (model, latency_class)
            tokens = shares.setdefault(model, [0.0] * 4)
            line = self._lines.setdefault(name, _Line(latency_class, tokens))
            line.push(fifo.served, fifo, 0, by_arrival=rules.fifo)

    def placed(self) -> None:
        """The ticket of the last turn has found its place."""
        self._placed = True

    def __iter__(self) -> Iterator[Turn]:
        while lines := [line for line in self._lines.values() if line.entries]:
            line = min(lines, key=self._rank)
            starving = self._is_starving(line)
            served, _, _, fifo, index = heapq.heappop(line.entries)
            if index == len(fifo.tickets):
                return
            ticket = fifo.tickets[index]
            self._placed = False
            yield Turn(ticket, first_of_all=starving or self._rules.fifo)
            if self._placed:
                tokens = ticket.num_prompt_tokens + expected_output(ticket, self._rules.output_estimate)
                served += tokens / self._rules.org(ticket.org).weight
                line.recent[ticket.latency_class] += tokens
            # Where the last one known found no room, the next one would find none either.
            if index + 1 < len(fifo.tickets) or (fifo.cut and self._placed):
                line.push(served, fifo, index + 1, by_arrival=self._rules.fifo)

    def _rank(self, line: _Line) -> tuple[bool, float, int, int, str]:
        ticket = line.next
        return not self._is_starving(line), -self._weight(ticket), ticket.latency_class, ticket.order, ticket.request_id

    def _weight(self, ticket: Ticket) -> float:
        """Its logarithm: a ticket may be old."""
        rules = self._rules.classes[ticket.latency_class]
        return math.log2(rules.weight) + ticket.waited_seconds / rules.age_seconds

    def _is_starving(self, line: _Line) -> bool:
        if self._rules.fifo:
            return False
        return line.recent[line.latency_class] < self._rules.classes[line.latency_class].floor_share * sum(line.recent)


def positions(fifos: Mapping[str, tuple[float, Sequence[tuple[str, int]]]], rules: "Rules") -> dict[str, int]:
    """Tickets ahead of each in one (model, class), from 0, as if all were of one size.

    `fifos`: org -> (tokens served, its (request id, order) in arrival order).
    """
    line = sorted(
        (0.0 if rules.fifo else (index + 1) / rules.org(org).weight, 0.0 if rules.fifo else served, order, request_id)
        for org, (served, entries) in fifos.items()
        for index, (request_id, order) in enumerate(entries)
    )
    return {request_id: position for position, (*_, request_id) in enumerate(line)}
