"""Where a ticket runs: of the workers that have room for it, the one that costs least by the routing in force.

Changes nothing but its own sketch of the fleet, and the reasons why tickets wait. In a large fleet a few are looked at: some by chance, and
those that have most of the prompt.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from services.policy.classes import BATCH, REALTIME
from services.scheduler.policy.decision import MAX_CANDIDATES, Candidate, Decision
from services.scheduler.policy.fleet import Worker, could_hold, needs, room, serves, share_blocks
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.order import Order, Ticket, Turn, expected_output
from services.scheduler.policy.prefix_index import Prefix, PrefixIndex
from services.scheduler.policy.routing import Cost, Offer, displaced
from services.scheduler.policy.rules import Rules

MAX_ALL = 16
"""Workers of one model up to which all are looked at."""
NUM_BEST_HOLDERS = 4

Draw = Callable[[int], int]
"""A number below the one given, each as likely: where chance comes from, so that this module has none of its own."""


@dataclass(frozen=True)
class Placement:
    """What the policy wants committed. The commit checks room again against `max_slots`, `max_blocks` and the org's share of these."""

    ticket: Ticket
    worker: Worker
    num_slots: int
    num_blocks: int
    max_blocks: int
    decision: Decision | None = None
    num_new_tokens: int = 0
    """Tokens of the prompt that the worker will have to compute, as far as is known."""
    counts_on: str = "free"
    """Room that is free, that lower classes hold (preempts), or none yet (waits)."""


@dataclass
class _Sketch:
    """The fleet as it will be once the placements so far are committed."""

    workers: dict[str, Worker]
    memory: Memory
    now: float
    draw: Draw | None
    kept: dict[str, int] = field(default_factory=dict)
    """Worker -> most urgent class that may not go there now, because a ticket of that class waits for its room: what comes
    behind may not take what room they gain, or a big ticket would wait for ever. More urgent classes may, as they preempt."""
    held_up: set[tuple[str, str, int]] = field(default_factory=set)
    """(org, model, class) with a ticket that waits for the org's own leases alone: so do the org's later ones."""
    unindexed: list[Placement] = field(default_factory=list)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    """What this round's placements bring where they go, once somebody looks: most rounds have one."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Incarnation -> tokens that they have to compute there."""
    turns: dict[str, int] = field(default_factory=dict)
    serving: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(model, version) -> the workers that serve it."""

    by_incarnation: dict[str, str] = field(default_factory=dict)
    """Incarnation -> worker; filled when it is needed."""

    def is_open(self, worker: Worker, ticket: Ticket) -> bool:
        return ticket.latency_class < self.kept.get(worker.worker_id, BATCH + 1)

    def is_closed(self, latency_class: int) -> bool:
        return len(self.kept) == len(self.workers) and all(kept <= latency_class for kept in self.kept.values())

    def keep(self, worker: Worker, turn: Turn) -> None:
        latency_class = REALTIME if turn.first_of_all else turn.ticket.latency_class
        self.kept[worker.worker_id] = min(latency_class, self.kept.get(worker.worker_id, BATCH))

    def servers(self, ticket: Ticket) -> list[str]:
        name = ticket.model, ticket.model_version
        if name not in self.serving:
            model, version = name
            served = ((worker_id, worker.models.get(model)) for worker_id, worker in self.workers.items())
            self.serving[name] = [worker_id for worker_id, its in served if its is not None and (not version or its.version == version)]
        return self.serving[name]

    def look_up(self, ticket: Ticket) -> tuple[Prefix, Prefix]:
        """Who has how much of its prompt by what was committed, and by what this round has planned."""
        for p in self.unindexed:
            self.index.sent(p.ticket, p.worker.incarnation, p.max_blocks * p.worker.models[p.ticket.model].block_size)
        self.unindexed.clear()
        return self.memory.index.look_up(ticket), self.index.look_up(ticket)

    def worker_of(self, incarnation: str) -> str | None:
        if not self.by_incarnation:
            self.by_incarnation = {worker.incarnation: worker_id for worker_id, worker in self.workers.items()}
        return self.by_incarnation.get(incarnation)

    def planned(self, placement: Placement) -> None:
        worker = placement.worker
        self.workers[worker.worker_id] = _debit(placement)
        self.unindexed.append(placement)
        self.tokens[worker.incarnation] = self.tokens.get(worker.incarnation, 0.0) + placement.num_new_tokens
        self.turns[worker.worker_id] = self.memory.num_placed + len(self.turns) + 1


def plan(
    order: Order,
    workers: Iterable[Worker],
    rules: Rules,
    memory: Memory | None = None,
    *,
    now: float = 0.0,
    draw: Draw | None = None,
) -> list[Placement]:
    """Placements for as many tickets as have room, in order. A ticket that has none keeps the worker closest to having it.

    `memory` is read, all but the reasons why tickets wait. `draw` None: all workers are looked at, however many there are.
    """
    memory = Memory() if memory is None else memory
    fleet = {worker.worker_id: worker for worker in workers}
    sketch = _Sketch(fleet, memory, now, draw)
    placements = []
    for turn in order:
        if sketch.is_closed(REALTIME):
            break
        if sketch.is_closed(turn.ticket.latency_class):
            memory.waited.setdefault(turn.ticket.request_id, "kept")
            continue
        placement = _place(turn, sketch, rules)
        if placement is not None:
            placements.append(placement)
            sketch.planned(placement)
            order.placed()
    return placements


def _place(turn: Turn, sketch: _Sketch, rules: Rules) -> Placement | None:
    ticket = turn.ticket
    line = (ticket.org, ticket.model, ticket.latency_class)
    look = _Look(ticket, sketch, rules)
    if line not in sketch.held_up and (offers := look.offers(look.some())):
        return look.best(offers)
    reachable = look.reachable(list(sketch.workers.values()))
    candidates = [w for w in reachable if sketch.is_open(w, ticket)]
    if line in sketch.held_up or not candidates:
        sketch.memory.waited[ticket.request_id] = _why_none(ticket, reachable, sketch, rules)
        return None
    allowed = [w for w in candidates if _is_within_share(ticket, w, rules)]
    if not allowed:
        sketch.held_up.add(line)
        sketch.memory.waited[ticket.request_id] = "share"
        return None
    offers = look.offers(allowed)
    if not offers:
        sketch.keep(max(allowed, key=lambda w: _spare(w, ticket, rules)), turn)
        sketch.memory.waited[ticket.request_id] = "room"
        return None
    return look.best(offers)


class _Look:
    """One ticket's look at the fleet."""

    def __init__(self, ticket: Ticket, sketch: _Sketch, rules: Rules) -> None:
        self._ticket = ticket
        self._sketch = sketch
        self._rules = rules
        self._org = rules.org(ticket.org)
        self._before, self._planned = sketch.look_up(ticket)

    def some(self) -> list[Worker]:
        """In a large fleet those that have most of the prompt and some by chance, MAX_ALL in all; else nobody: all are looked at then."""
        names, draw = self._sketch.servers(self._ticket), self._sketch.draw
        if draw is None or len(names) <= MAX_ALL:
            return []
        incarnations = {*self._before.holders(NUM_BEST_HOLDERS), *self._planned.holders(NUM_BEST_HOLDERS)}
        chosen = dict.fromkeys(name for i in sorted(incarnations) if (name := self._sketch.worker_of(i)) is not None)
        for _ in range(4 * MAX_ALL):  # some are drawn twice
            if len(chosen) >= MAX_ALL:
                break
            chosen[names[draw(len(names))]] = None
        reachable = self.reachable([self._sketch.workers[name] for name in chosen])
        return [worker for worker in reachable if self._sketch.is_open(worker, self._ticket)]

    def reachable(self, workers: list[Worker]) -> list[Worker]:
        """Excluded workers are left out while there are others. Alone they are better than nothing, if they live on for a while."""
        ticket = self._ticket
        candidates = [w for w in workers if could_hold(w, ticket, self._org)]
        reachable = [w for w in candidates if w.worker_id not in ticket.excluded_workers]
        if not reachable and ticket.asked_seconds < self._rules.exclusion_seconds:
            return []
        return reachable or candidates

    def offers(self, workers: Sequence[Worker]) -> list[Offer]:
        """Of those that have room, of the suspended ones only where there are no others."""
        offers = [offer for worker in workers if (offer := self._offer(worker)) is not None]
        return [offer for offer in offers if not offer.worker.node.suspended] or offers

    def _offer(self, worker: Worker) -> Offer | None:
        ticket, rules, sketch, model = self._ticket, self._rules, self._sketch, worker.models[self._ticket.model]
        slots, blocks = needs(ticket, worker, model, self._org, rules.output_estimate)
        free_slots, free_blocks = room(worker, model, ticket.latency_class, preemptible=rules.preemptible)
        share = share_blocks(model.num_blocks, self._org) - worker.org_blocks.get(ticket.org, 0)
        if slots > free_slots or blocks > min(free_blocks, share):
            return None
        incarnation = worker.incarnation
        return Offer(
            ticket, worker, model, slots, blocks, expected_output(ticket, rules.output_estimate),
            num_found_tokens=max(self._before.tokens(incarnation), self._planned.tokens(incarnation)),
            backlog_tokens=sketch.memory.backlog.tokens(incarnation, sketch.now) + sketch.tokens.get(incarnation, 0.0),
            distance_seconds=rules.distance(ticket.region, worker.node.region),
            turn=max(sketch.memory.turns.get(worker.worker_id, 0), sketch.turns.get(worker.worker_id, 0)),
        )  # fmt: skip

    def best(self, offers: list[Offer]) -> Placement:
        """The one that costs least, equals by name."""
        costs = self._rules.routing.costs(offers)
        ranked = ((cost, offer.worker.worker_id, offer) for cost, offer in zip(costs, offers, strict=True))
        least = heapq.nsmallest(MAX_CANDIDATES, ranked)  # no two workers have one name: offers are never compared
        _, _, best = least[0]
        num_waiting, preempted = displaced(best)
        return Placement(
            self._ticket, best.worker, best.num_slots, best.num_blocks, best.model.num_blocks,
            decision=self._decision([(cost, offer) for cost, _, offer in least], {offer.worker.worker_id for offer in offers}),
            num_new_tokens=best.num_new_tokens,
            counts_on="waits" if num_waiting else "preempts" if preempted else "free",
        )  # fmt: skip

    def _decision(self, least: list[tuple[Cost, Offer]], fitting: set[str]) -> Decision:
        """Those of the least cost, then as many of the others as there is room for, with why they could not be chosen."""
        ticket, sketch, rules = self._ticket, self._sketch, self._rules
        others = islice((w for w in sketch.workers.values() if w.worker_id not in fitting), MAX_CANDIDATES - len(least))
        refused = [Candidate(w.worker_id, refused=_refusal(ticket, w, sketch, rules)) for w in others]
        candidates = [Candidate(offer.worker.worker_id, cost) for cost, offer in least] + refused
        waited_for = sketch.memory.waited.get(ticket.request_id, "")
        return Decision(len(sketch.workers), candidates, waited_for, terms=rules.routing.terms)


def _why_none(ticket: Ticket, reachable: list[Worker], sketch: _Sketch, rules: Rules) -> str:
    """Why it has no candidate, though it may have its turn."""
    if reachable:
        return "share" if (ticket.org, ticket.model, ticket.latency_class) in sketch.held_up else "kept"
    return "excluded" if any(could_hold(w, ticket, rules.org(ticket.org)) for w in sketch.workers.values()) else "unserved"


def _refusal(ticket: Ticket, worker: Worker, sketch: _Sketch, rules: Rules) -> str:
    """Why a worker could not be chosen, though others could."""
    if serves(worker, ticket) is None:
        return "unserved"
    if not could_hold(worker, ticket, rules.org(ticket.org)):
        return "too_small"
    if worker.worker_id in ticket.excluded_workers:
        return "excluded"
    if not sketch.is_open(worker, ticket):
        return "kept"
    if not _is_within_share(ticket, worker, rules):
        return "share"
    return "suspended" if worker.node.suspended else "room"


def _is_within_share(ticket: Ticket, worker: Worker, rules: Rules) -> bool:
    model, org = worker.models[ticket.model], rules.org(ticket.org)
    _, blocks = needs(ticket, worker, model, org, rules.output_estimate)
    return worker.org_blocks.get(ticket.org, 0) + blocks <= share_blocks(model.num_blocks, org)


def _spare(worker: Worker, ticket: Ticket, rules: Rules) -> tuple[int, int, str]:
    slots, blocks = room(worker, worker.models[ticket.model], ticket.latency_class, preemptible=rules.preemptible)
    return blocks, slots, worker.worker_id


def _debit(placement: Placement) -> Worker:
    worker, ticket = placement.worker, placement.ticket
    slots = tuple(used + (placement.num_slots if c == ticket.latency_class else 0) for c, used in enumerate(worker.used_slots))
    blocks = tuple(used + (placement.num_blocks if c == ticket.latency_class else 0) for c, used in enumerate(worker.used_blocks))
    org_blocks = {**worker.org_blocks, ticket.org: worker.org_blocks.get(ticket.org, 0) + placement.num_blocks}
    return replace(worker, used_slots=slots, used_blocks=blocks, org_blocks=org_blocks)
