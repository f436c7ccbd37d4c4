"""A mesh on a virtual clock: the real queue order and the real policy place requests on simulated nodes. It decides nothing itself.

Stands in for Redis (who waits, what is reserved), for heartbeats (which are late, as they are) and for the clock.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.fleet.node import Job, Node
from bench.fleet.shared import SharedNode
from bench.fleet.trace import Row
from services.scheduler.policy.fleet import ServedModel, Worker
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.node import prefill_rate
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import plan
from services.scheduler.policy.rules import Rules

MAX_HEADS = 64
"""As the dispatcher."""
STANDARD = 2


@dataclass(frozen=True)
class Beats:
    """Seconds between heartbeats, at least between two when room appears, and until one has arrived."""

    each: float = 1.0
    least: float = 0.02
    late: float = 0.0


@dataclass
class Outcome:
    """What came of it. Lists by request that has ended; seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    slowed_seconds: float = 0.0
    where: dict[str, str] = field(default_factory=dict)
    """Request -> node."""
    jobs: dict[str, Job] = field(default_factory=dict, compare=False)
    """By request."""


@dataclass(frozen=True)
class Arrival:
    """A request of a model."""

    row: Row
    model: str


def roughly(num_output_tokens: int) -> int:
    """max_tokens of a client that knows roughly how much it wants."""
    return max(16, 1 << (num_output_tokens - 1).bit_length())


class Mesh:
    """One scheduler and its nodes. `run` once."""

    def __init__(
        self,
        nodes: Sequence[Node | SharedNode],
        rules: Rules,
        *,
        beats: Beats | None = None,
        seed: int = 0,
        asked: Callable[[int], int] = roughly,
    ) -> None:
        """`asked`: max_tokens of a client that will get so many."""
        self._nodes = {node.name: node for node in nodes}
        self._rules = rules
        self._beats = beats or Beats()
        self._asked = asked
        self._block_tokens = nodes[0].engine.block_tokens
        self._draw = random.Random(seed).randrange
        self._memory = Memory()
        self._workers = {node.name: _worker(node) for node in nodes}
        self._queues: dict[str, deque[tuple[Ticket, float]]] = {model: deque() for node in nodes for model in node.served}
        self._held: dict[str, tuple[str, int, int]] = {}  # request -> node, slots, blocks
        self._keys: dict[str, Sequence[bytes]] = {}
        self._outputs: dict[str, int] = {}
        self._beat_at = dict.fromkeys(self._nodes, float("-inf"))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._turns: dict[str, float] = {}
        self._left = 0
        self.outcome = Outcome()

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Until the last request has ended."""
        self._left = len(arrivals)
        for number, arrival in enumerate(arrivals):
            self._at(arrival.row.at, lambda now, n=number, a=arrival: self._arrive(n, a, now))  # type: ignore[misc]
        for place, name in enumerate(self._nodes):
            self._beat(name, 0.0)  # as soon as they have registered, which was before the first request
            self._at(self._beats.each * (place + 1) / len(self._nodes), lambda now, name=name: self._tick(name, now))  # type: ignore[misc]
        while self._left:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self.outcome.hit_tokens = sum(node.num_hit_tokens for node in self._nodes.values())
        self.outcome.slowed_seconds = sum(node.slowed_seconds for node in self._nodes.values())
        return self.outcome

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, event))

    # --- requests

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        row, request_id = arrival.row, f"r{number}"
        ticket = Ticket(
            request_id, "org", STANDARD, arrival.model, "v1", row.num_prompt_tokens, self._asked(row.num_output_tokens), order=number,
            block_hashes="".join(f"{block:016x}" for block in row.blocks[:256]), hash_tokens=self._block_tokens if row.blocks else 0,
        )  # fmt: skip
        self._keys[request_id] = [block.to_bytes(8, "big") for block in row.blocks]
        self._outputs[request_id] = row.num_output_tokens
        self._queues[arrival.model].append((ticket, now))
        self._place(now)

    def _place(self, now: float) -> None:
        """As the dispatcher: the first of every queue, in the policy's order, where the policy wants them."""
        fifos = [
            Fifo([replace(ticket, waited_seconds=now - came) for ticket, came in list(queue)[:MAX_HEADS]], cut=len(queue) > MAX_HEADS)
            for queue in self._queues.values()
            if queue
        ]
        placements = plan(Order(fifos, self._rules), self._workers.values(), self._rules, self._memory, now=now, draw=self._draw)
        for p in placements:
            ticket, name = p.ticket, p.worker.worker_id
            queue = self._queues[ticket.model]
            came = next(came for waiting, came in queue if waiting.request_id == ticket.request_id)
            self._queues[ticket.model] = deque(entry for entry in queue if entry[0].request_id != ticket.request_id)
            self._memory.committed(ticket, p.worker, p.num_new_tokens, now)
            self._reserve(name, p.num_slots, p.num_blocks)
            self._held[ticket.request_id] = name, p.num_slots, p.num_blocks
            self.outcome.where[ticket.request_id] = name
            job = self.outcome.jobs[ticket.request_id] = Job(
                ticket.request_id, ticket.num_prompt_tokens, self._outputs[ticket.request_id], self._keys.pop(ticket.request_id), came,
                model=ticket.model,
            )  # fmt: skip
            self._nodes[name].take(job, now)
            self._schedule(name)

    def _reserve(self, name: str, slots: int, blocks: int) -> None:
        worker = self._workers[name]
        used_slots, used_blocks = list(worker.used_slots), list(worker.used_blocks)
        used_slots[STANDARD] += slots
        used_blocks[STANDARD] += blocks
        self._workers[name] = replace(worker, used_slots=tuple(used_slots), used_blocks=tuple(used_blocks))

    # --- nodes

    def _schedule(self, name: str) -> None:
        until = self._nodes[name].until
        if until != self._turns.get(name) and until != float("inf"):
            self._turns[name] = until
            self._at(until, lambda now: self._turn(name, now))

    def _turn(self, name: str, now: float) -> None:
        node = self._nodes[name]
        if node.until != now:  # a run that was cut since
            return
        _, ended = node.turn(now)
        for job in ended:
            self._end(job)
        if ended and now - self._beat_at[name] >= self._beats.least:
            self._beat(name, now)
        self._schedule(name)
        if ended and any(self._queues.values()):
            self._place(now)

    def _end(self, job: Job) -> None:
        name, slots, blocks = self._held.pop(job.request_id)
        self._reserve(name, -slots, -blocks)
        self._memory.backlog.ended(job.request_id)
        self._left -= 1
        self.outcome.ttft.append(job.first_at - job.arrived)
        self.outcome.ended_at.append(job.ended_at)
        if job.num_output_tokens > 1:
            self.outcome.tpot.append((job.ended_at - job.first_at) / (job.num_output_tokens - 1))

    def _tick(self, name: str, now: float) -> None:
        self._beat(name, now)
        self._at(now + self._beats.each, lambda now: self._tick(name, now))

    def _beat(self, name: str, now: float) -> None:
        """A heartbeat goes out, and is heard when it has arrived."""
        node = self._nodes[name]
        state, lacking = node.state(now)
        rate = prefill_rate(state, node.num_running, node.num_context_tokens)
        listed = set(node.jobs)
        self._beat_at[name] = now

        def heard(now: float) -> None:
            self._workers[name] = replace(self._workers[name], node=state)
            self._memory.backlog.told(name, lacking, rate, listed, now)

        if self._beats.late and now > 0:
            self._at(now + self._beats.late, heard)
        else:
            heard(now)


def _worker(node: Node | SharedNode) -> Worker:
    engine = node.engine
    models = {
        model: ServedModel("v1", engine.block_tokens, num_blocks, num_blocks * engine.block_tokens)
        for model, num_blocks in node.served.items()
    }
    return Worker(node.name, node.name, node.name, engine.max_sequences, engine.max_sequences + engine.max_waiting, models)
