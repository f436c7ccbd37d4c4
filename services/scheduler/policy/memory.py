"""What one scheduler remembers from round to round: of what it has sent where, and of why tickets had to wait. Pure: time is passed in."""

from dataclasses import dataclass, field

from services.scheduler.policy.backlog import Backlog
from services.scheduler.policy.fleet import Worker
from services.scheduler.policy.order import Ticket
from services.scheduler.policy.prefix_index import PrefixIndex

MAX_WAITED = 10_000
"""Tickets of which it is remembered why they weren't placed."""


@dataclass
class Memory:
    """Told of placements when they are committed, never of those that were only planned."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    backlog: Backlog = field(default_factory=Backlog)
    turns: dict[str, int] = field(default_factory=dict)
    """Worker -> number of the last placement that it got, from 1."""
    waited: dict[str, str] = field(default_factory=dict)
    """Request id -> why it wasn't placed when it was looked at last."""
    num_placed: int = 0

    def committed(self, ticket: Ticket, worker: Worker, num_new_tokens: int, now: float) -> None:
        """The ticket is placed there, with so many tokens of its prompt to compute."""
        model = worker.models[ticket.model]
        self.index.sent(ticket, worker.incarnation, model.num_blocks * model.block_size)
        self.backlog.sent(worker.incarnation, ticket.request_id, num_new_tokens, now)
        self.num_placed += 1
        self.turns[worker.worker_id] = self.num_placed
        self.waited.pop(ticket.request_id, None)

    def forget_the_gone(self) -> None:
        """Others may have placed what waited, or it may be gone: bounded, whatever became of it."""
        if len(self.waited) > MAX_WAITED:
            self.waited.clear()
