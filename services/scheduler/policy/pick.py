"""Where a ticket runs: where it displaces least, then where least is left to compute, then the least loaded worker.

Changes nothing but its own sketch of the fleet, and what it is given to remember.
"""

import heapq
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import islice

from services.policy.classes import BATCH, REALTIME
from services.policy.org import OrgPolicy
from services.scheduler.policy.decision import MAX_CANDIDATES, Candidate, Decision
from services.scheduler.policy.order import Order, Ticket, Turn
from services.scheduler.policy.prefix_index import PrefixIndex
from services.scheduler.policy.rules import Rules


@dataclass(frozen=True)
class ServedModel:
    """A model that a worker has loaded. Blocks are its cache blocks in all; they hold at least one sequence of `max_model_len`."""

    version: str
    block_size: int
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True)
class Worker:
    """A worker that may be used, with its slots and blocks in use by class 0..3, and its blocks that leases of each org hold."""

    worker_id: str
    incarnation: str
    address: str
    max_sequences: int
    max_slots: int
    models: Mapping[str, ServedModel]
    used_slots: tuple[int, ...] = (0, 0, 0, 0)
    used_blocks: tuple[int, ...] = (0, 0, 0, 0)
    org_blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """What the policy wants committed. The commit checks room again against `max_slots`, `max_blocks` and the org's share of these."""

    ticket: Ticket
    worker: Worker
    num_slots: int
    num_blocks: int
    max_blocks: int
    decision: Decision | None = None
    prefill: float = 0.0
    """Prompt tokens that the worker would have to compute, times the sequences that they would hold up; see explain.proto."""


def blocks_for(block_size: int, num_prompt_tokens: int, num_output_tokens: int, n: int) -> int:
    """Blocks for n choices of so many output tokens each; full blocks of the prompt are shared."""
    shared = num_prompt_tokens // block_size
    own = -(-(num_prompt_tokens % block_size + num_output_tokens) // block_size)
    return shared + n * own


def serves(worker: Worker, ticket: Ticket) -> ServedModel | None:
    """The model that the ticket names, if this worker has it in that version. A ticket without a version takes any."""
    model = worker.models.get(ticket.model)
    if model is None or (ticket.model_version and model.version != ticket.model_version):
        return None
    return model


def share_blocks(num_blocks: int, org: OrgPolicy) -> int:
    """Blocks of a worker that one org's leases may hold."""
    return max(1, int(num_blocks * org.kv_share))


def longest(model: ServedModel, org: OrgPolicy) -> int:
    """Longest sequence in tokens that the org may run there."""
    return min(model.max_model_len, share_blocks(model.num_blocks, org) * model.block_size)


def could_hold(worker: Worker, ticket: Ticket, org: OrgPolicy) -> bool:
    """Whether this worker, empty, could run the ticket to its end: workers of one model may differ in context length and cache.

    Choices that don't fit side by side run one after another, so one choice decides.
    """
    model = serves(worker, ticket)
    return model is not None and ticket.num_prompt_tokens + ticket.max_tokens <= longest(model, org)


def needs(ticket: Ticket, worker: Worker, model: ServedModel, rules: Rules) -> tuple[int, int]:
    """(slots, blocks) to reserve. Never more than the whole worker has, or the org's share of it, so that what fits there is placeable."""
    delivered = -(-ticket.num_delivered_tokens // ticket.n)
    output = min(ticket.max_tokens, delivered + rules.output_estimate)
    blocks = blocks_for(model.block_size, ticket.num_prompt_tokens, output, ticket.n)
    return min(ticket.n, worker.max_sequences), min(blocks, share_blocks(model.num_blocks, rules.org(ticket.org)))


def room(worker: Worker, model: ServedModel, latency_class: int, *, preemptible: bool) -> tuple[int, int]:
    """(slots, blocks) that a class may take: what is free and, where engines preempt by class, what lower classes hold."""
    last = latency_class if preemptible else BATCH
    return worker.max_slots - sum(worker.used_slots[: last + 1]), model.num_blocks - sum(worker.used_blocks[: last + 1])


_Cost = tuple[int, float, float, float, float, float, str]


@dataclass
class _Sketch:
    """The fleet as it will be once the placements so far are committed."""

    workers: dict[str, Worker]
    kept: dict[str, int] = field(default_factory=dict)
    """Worker -> most urgent class that may not go there now, because a ticket of that class waits for its room: what comes
    behind may not take what room they gain, or a big ticket would wait for ever. More urgent classes may, as they preempt."""
    held_up: set[tuple[str, str, int]] = field(default_factory=set)
    """(org, model, class) with a ticket that waits for the org's own leases alone: so do the org's later ones."""
    waited: MutableMapping[str, str] = field(default_factory=dict)
    """Request id -> why it wasn't placed when it was looked at last."""
    index: PrefixIndex = field(default_factory=PrefixIndex)

    def is_open(self, worker: Worker, ticket: Ticket) -> bool:
        return ticket.latency_class < self.kept.get(worker.worker_id, BATCH + 1)

    def is_closed(self, latency_class: int) -> bool:
        return len(self.kept) == len(self.workers) and all(kept <= latency_class for kept in self.kept.values())

    def keep(self, worker: Worker, turn: Turn) -> None:
        latency_class = REALTIME if turn.first_of_all else turn.ticket.latency_class
        self.kept[worker.worker_id] = min(latency_class, self.kept.get(worker.worker_id, BATCH))


def plan(
    order: Order,
    workers: Iterable[Worker],
    rules: Rules,
    waited: MutableMapping[str, str] | None = None,
    index: PrefixIndex | None = None,
) -> list[Placement]:
    """Placements for as many tickets as have room, in order. A ticket that has none keeps the worker closest to having it.

    `waited`: request id -> why it wasn't placed the last time. `index`: what was sent where. Both are brought up to date.
    """
    fleet = {worker.worker_id: worker for worker in workers}
    sketch = _Sketch(fleet, waited={} if waited is None else waited, index=PrefixIndex() if index is None else index)
    placements = []
    for turn in order:
        if sketch.is_closed(REALTIME):
            break
        if sketch.is_closed(turn.ticket.latency_class):
            sketch.waited.setdefault(turn.ticket.request_id, "kept")
            continue
        placement = _place(turn, sketch, rules)
        if placement is not None:
            placements.append(placement)
            order.placed()
    return placements


def _place(turn: Turn, sketch: _Sketch, rules: Rules) -> Placement | None:
    ticket = turn.ticket
    line = (ticket.org, ticket.model, ticket.latency_class)
    reachable = _reachable(ticket, sketch, rules)
    candidates = [w for w in reachable if sketch.is_open(w, ticket)]
    if line in sketch.held_up or not candidates:
        sketch.waited[ticket.request_id] = _why_none(ticket, reachable, sketch, rules)
        return None
    allowed = [w for w in candidates if _is_within_share(ticket, w, rules)]
    if not allowed:
        sketch.held_up.add(line)
        sketch.waited[ticket.request_id] = "share"
        return None
    found = sketch.index.found(ticket) if rules.routing == "prefix" else None
    fits = [placement for w in allowed if (placement := _fit(ticket, w, rules, found)) is not None]
    if not fits:
        sketch.keep(max(allowed, key=lambda w: _spare(w, ticket, rules)), turn)
        sketch.waited[ticket.request_id] = "room"
        return None
    least = heapq.nsmallest(MAX_CANDIDATES, ((_cost(p), p) for p in fits))  # costs end with names: no two are equal
    best = replace(least[0][1], decision=_decision(ticket, least, {p.worker.worker_id for p in fits}, sketch, rules))
    sketch.workers[best.worker.worker_id] = _debit(best)
    if found is not None:
        model = best.worker.models[ticket.model]
        sketch.index.sent(ticket, best.worker.incarnation, model.num_blocks * model.block_size)
    return best


def _why_none(ticket: Ticket, reachable: list[Worker], sketch: _Sketch, rules: Rules) -> str:
    """Why it has no candidate, though it may have its turn."""
    if reachable:
        return "share" if (ticket.org, ticket.model, ticket.latency_class) in sketch.held_up else "kept"
    return "excluded" if any(could_hold(w, ticket, rules.org(ticket.org)) for w in sketch.workers.values()) else "unserved"


def _decision(ticket: Ticket, least: list[tuple[_Cost, Placement]], fitting: set[str], sketch: _Sketch, rules: Rules) -> Decision:
    """Those of the least cost, then as many of the others as there is room for, with why they could not be chosen."""
    others = islice((w for w in sketch.workers.values() if w.worker_id not in fitting), MAX_CANDIDATES - len(least))
    refused = [Candidate(w.worker_id, refused=_refusal(ticket, w, sketch, rules)) for w in others]
    candidates = [Candidate(p.worker.worker_id, cost[:-1]) for cost, p in least] + refused
    return Decision(len(sketch.workers), candidates, sketch.waited.pop(ticket.request_id, ""))


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
    return "room" if _is_within_share(ticket, worker, rules) else "share"


def _reachable(ticket: Ticket, sketch: _Sketch, rules: Rules) -> list[Worker]:
    """Excluded workers are left out while there are others. Alone they are better than nothing, if they live on for a while."""
    org = rules.org(ticket.org)
    candidates = [w for w in sketch.workers.values() if could_hold(w, ticket, org)]
    reachable = [w for w in candidates if w.worker_id not in ticket.excluded_workers]
    if not reachable and ticket.asked_seconds < rules.exclusion_seconds:
        return []
    return reachable or candidates


def _is_within_share(ticket: Ticket, worker: Worker, rules: Rules) -> bool:
    model = worker.models[ticket.model]
    _, blocks = needs(ticket, worker, model, rules)
    return worker.org_blocks.get(ticket.org, 0) + blocks <= share_blocks(model.num_blocks, rules.org(ticket.org))


def _fit(ticket: Ticket, worker: Worker, rules: Rules, found: Mapping[str, int] | None) -> Placement | None:
    """`found`: incarnation -> prompt tokens that it has; None where they don't count."""
    model = worker.models[ticket.model]
    slots, blocks = needs(ticket, worker, model, rules)
    free_slots, free_blocks = room(worker, model, ticket.latency_class, preemptible=rules.preemptible)
    if slots > free_slots or blocks > free_blocks:
        return None
    prefill = 0.0
    if found is not None:
        lacking = ticket.num_prompt_tokens + ticket.num_delivered_tokens - found.get(worker.incarnation, 0)
        prefill = float(lacking * (min(sum(worker.used_slots), worker.max_sequences) + 1))
    return Placement(ticket, worker, slots, blocks, model.num_blocks, prefill=prefill)


def _spare(worker: Worker, ticket: Ticket, rules: Rules) -> tuple[int, int, str]:
    slots, blocks = room(worker, worker.models[ticket.model], ticket.latency_class, preemptible=rules.preemptible)
    return blocks, slots, worker.worker_id


def _cost(p: Placement) -> _Cost:
    """What is to be least: choices that wait for a slot there, what is preempted, prefill, load, load of rivals, cache in use; the name."""
    w, rivals = p.worker, slice(p.ticket.latency_class + 1)
    num_waiting = max(0, sum(w.used_slots[rivals]) + p.num_slots - w.max_sequences)
    preempted = _lacking(p.num_slots, sum(w.used_slots), w.max_sequences) + _lacking(p.num_blocks, sum(w.used_blocks), p.max_blocks)
    load, rival_load = min(1.0, sum(w.used_slots) / w.max_sequences), sum(w.used_slots[rivals]) / w.max_sequences
    return num_waiting, preempted, p.prefill, load, rival_load, sum(w.used_blocks) / p.max_blocks, w.worker_id


def counts_on(p: Placement) -> str:
    """What the placement counts on there: free, preempts (room that lower classes hold), waits (for a slot)."""
    num_waiting, preempted, *_ = _cost(p)
    return "waits" if num_waiting else "preempts" if preempted else "free"


def _lacking(wanted: int, used: int, whole: int) -> float:
    """Share of the whole that isn't free and would have to be taken from others."""
    return min(wanted, max(0, used + wanted - whole)) / whole


def _debit(placement: Placement) -> Worker:
    worker, ticket = placement.worker, placement.ticket
    slots = tuple(used + (placement.num_slots if c == ticket.latency_class else 0) for c, used in enumerate(worker.used_slots))
    blocks = tuple(used + (placement.num_blocks if c == ticket.latency_class else 0) for c, used in enumerate(worker.used_blocks))
    org_blocks = {**worker.org_blocks, ticket.org: worker.org_blocks.get(ticket.org, 0) + placement.num_blocks}
    return replace(worker, used_slots=slots, used_blocks=blocks, org_blocks=org_blocks)


def impossible(ticket: Ticket, workers: Iterable[Worker], org: OrgPolicy) -> tuple[str, str] | None:
    """(field, words) if no worker of the model could hold this ticket even when empty; None if one could, or none serves it."""
    models = [model for worker in workers if (model := serves(worker, ticket)) is not None]
    if not models:
        return None
    prompt, total = ticket.num_prompt_tokens, ticket.num_prompt_tokens + ticket.max_tokens
    most = max(longest(model, org) for model in models)
    limited = most < max(model.max_model_len for model in models)
    takes = f"{ticket.model} takes at most {most}" + (f", the org's share ({org.kv_share:g}) of a worker's cache," if limited else "")
    if prompt > most:
        return "prompt", f"the prompt has {prompt} tokens; {takes}: shorten it"
    if total > most:
        return (
            "max_tokens",
            f"{prompt} prompt tokens + max_tokens {ticket.max_tokens} is {total}; {takes} in all: "
            f"set max_tokens to at most {most - prompt} or shorten the prompt",
        )
    return None
