"""Endless urgent load on a virtual clock, with the policy as it is: nobody starves, and everybody's floor holds."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from services.policy.classes import BATCH, REALTIME, STANDARD
from services.scheduler.policy.fleet import ServedModel, Worker
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import plan
from services.scheduler.policy.rules import Rules

MODEL = "tiny@fp32"
TICK_SECONDS = 0.1
FADE_SECONDS = 10.0  # as common.lua's RECENT_MS


@dataclass
class Mesh:
    """One worker whose leases hold their room until they end, and queues that are read and charged as the scripts do."""

    rules: Rules
    slots: int = 4
    now: float = 0.0
    waiting: list[tuple[float, float, Ticket]] = field(default_factory=list)  # arrival, service seconds
    running: list[tuple[float, int, int, int]] = field(default_factory=list)  # end, class, slots, blocks
    served: Counter[tuple[int, str]] = field(default_factory=Counter)
    recent: list[float] = field(default_factory=lambda: [0.0] * 4)
    placed_tokens: Counter[int] = field(default_factory=Counter)
    placed_at: dict[str, float] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def arrive(self, latency_class: int, service_seconds: float, *, org: str = "a", tokens: int = 100) -> str:
        number = next(self.numbers)
        ticket = Ticket(f"r{number}", org, latency_class, MODEL, "v1", tokens, 0, order=number)
        self.waiting.append((self.now, service_seconds, ticket))
        return ticket.request_id

    def num_waiting(self, latency_class: int) -> int:
        return sum(ticket.latency_class == latency_class for _, _, ticket in self.waiting)

    def tick(self) -> None:
        self.now += TICK_SECONDS
        self.recent = [tokens * math.exp(-TICK_SECONDS / FADE_SECONDS) for tokens in self.recent]
        self.running = [lease for lease in self.running if lease[0] > self.now]
        while self._place_some():
            pass

    def _place_some(self) -> bool:
        queues: dict[tuple[int, str], list[Ticket]] = {}
        for arrived, _, ticket in self.waiting:
            queue = queues.setdefault((ticket.latency_class, ticket.org), [])
            queue.append(replace(ticket, waited_seconds=self.now - arrived))
        fifos = [Fifo(queue[:4], self.served[line], len(queue) > 4) for line, queue in queues.items()]
        placements = plan(Order(fifos, self.rules, {MODEL: self.recent}), [self._worker()], self.rules)
        for placement in placements:
            ticket = placement.ticket
            (entry,) = [entry for entry in self.waiting if entry[2].request_id == ticket.request_id]
            self.waiting.remove(entry)
            self.running.append((self.now + entry[1], ticket.latency_class, placement.num_slots, placement.num_blocks))
            self.served[ticket.latency_class, ticket.org] += ticket.num_prompt_tokens
            self.recent[ticket.latency_class] += ticket.num_prompt_tokens
            self.placed_tokens[ticket.latency_class] += ticket.num_prompt_tokens
            self.placed_at[ticket.request_id] = self.now
        return bool(placements)

    def _worker(self) -> Worker:
        slots, blocks = [0] * 4, [0] * 4
        for _, latency_class, num_slots, num_blocks in self.running:
            slots[latency_class] += num_slots
            blocks[latency_class] += num_blocks
        model = ServedModel("v1", 16, 64, 1024)
        return Worker("w", "i", "host:1", self.slots, self.slots + 2, {MODEL: model}, tuple(slots), tuple(blocks))


def _flood(mesh: Mesh, latency_class: int, service_seconds: float, *, org: str = "a") -> None:
    """There are always 20 more of these."""
    while mesh.num_waiting(latency_class) < 20:
        mesh.arrive(latency_class, service_seconds, org=org)


def _wait_of_a_batch_request(rules: Rules, tokens: int) -> float:
    """Seconds until it is placed, when realtime has flooded the mesh for half a minute and goes on."""
    mesh = Mesh(rules)
    for _ in range(300):
        _flood(mesh, REALTIME, 0.5)
        mesh.tick()
    arrived, batch = mesh.now, mesh.arrive(BATCH, 8.0, tokens=tokens)
    while batch not in mesh.placed_at and mesh.now < arrived + 100:
        _flood(mesh, REALTIME, 0.5)
        mesh.tick()
    return mesh.placed_at[batch] - arrived


@pytest.mark.parametrize("preemptible", [False, True])
@pytest.mark.parametrize("tokens", [100, 1000], ids=["a small one", "one that takes the whole worker"])
def test_a_batch_request_is_placed_within_a_minute_of_endless_realtime_load(preemptible: bool, tokens: int) -> None:
    """Case F26. What it takes longer than that is its own service time."""
    assert _wait_of_a_batch_request(Rules(preemptible=preemptible), tokens) <= 60


@pytest.mark.parametrize("preemptible", [False, True])
def test_age_alone_would_do_it_too_where_a_slot_is_all_it_needs(preemptible: bool) -> None:
    rules = Rules(preemptible=preemptible)
    no_floors = {latency_class: replace(settings, floor_share=0.0) for latency_class, settings in rules.classes.items()}
    assert 30 < _wait_of_a_batch_request(replace(rules, classes=no_floors), 100) <= 60


def test_each_flooding_class_gets_its_floor_and_the_most_urgent_the_rest() -> None:
    mesh = Mesh(Rules(preemptible=False))
    for _ in range(1500):
        for latency_class in (REALTIME, STANDARD, BATCH):
            _flood(mesh, latency_class, 0.5)
        mesh.tick()
    shares = [mesh.placed_tokens[latency_class] / mesh.placed_tokens.total() for latency_class in (REALTIME, STANDARD, BATCH)]
    assert shares[0] >= 0.5
    assert shares[1] == pytest.approx(0.2, abs=0.03)
    assert shares[2] == pytest.approx(0.05, abs=0.02)


def test_realtime_never_waits_behind_an_old_backlog_of_batch() -> None:
    """Three times what the worker can do in batch, for two minutes: a realtime request is placed in the tick in which it comes."""
    mesh = Mesh(Rules())
    for tick in range(1200):
        if tick % 2 == 0:
            mesh.arrive(BATCH, 4.0, org=f"org{tick % 3}")
        if tick % 40 == 0:
            realtime, arrived = mesh.arrive(REALTIME, 1.0), mesh.now
        mesh.tick()
        if tick % 40 == 0:
            assert mesh.placed_at[realtime] - arrived <= TICK_SECONDS * 1.01
    assert mesh.num_waiting(BATCH) > 100
    assert mesh.now - min(arrived for arrived, _, _ in mesh.waiting) > 60, "older than any age that outweighs realtime"
