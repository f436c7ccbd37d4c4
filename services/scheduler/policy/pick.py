"""Where a ticket runs: the least loaded worker with room for it. Knows nothing of fifos, and changes nothing but its own sketch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.scheduler.policy.order import BATCH, Ticket

CLASSES = range(BATCH + 1)
"""0 is what is in use and belongs to no lease that we know."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a worker has loaded. Blocks are its cache blocks in all; they hold at least one sequence of `max_model_len`."""

    version: str
    block_size: int
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True)
class Worker:
    """A worker that may be used, with its slots and blocks in use by class 0..3."""

    worker_id: str
    incarnation: str
    address: str
    max_sequences: int
    max_slots: int
    models: Mapping[str, ServedModel]
    used_slots: tuple[int, ...] = (0, 0, 0, 0)
    used_blocks: tuple[int, ...] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Placement:
    """What the policy wants committed. The commit checks `room` again against `max_slots` and `max_blocks`."""

    ticket: Ticket
    worker: Worker
    num_slots: int
    num_blocks: int
    max_blocks: int


@dataclass(frozen=True)
class Rules:
    """What operators may set. `output_estimate`: tokens per choice that a ticket is expected to need when its max_tokens says more."""

    output_estimate: int = 256
    preemptible: bool = False
    exclusion_seconds: float = 1.0


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


def could_hold(worker: Worker, ticket: Ticket) -> bool:
    """Whether this worker, empty, could run the ticket to its end: workers of one model may differ in context length and cache.

    Choices that don't fit side by side run one after another, so one choice decides.
    """
    model = serves(worker, ticket)
    return model is not None and ticket.num_prompt_tokens + ticket.max_tokens <= model.max_model_len


def needs(ticket: Ticket, worker: Worker, model: ServedModel, output_estimate: int) -> tuple[int, int]:
    """(slots, blocks) to reserve. Never more than the whole worker has, so that what fits an empty worker is placeable."""
    delivered = -(-ticket.num_delivered_tokens // ticket.n)
    output = min(ticket.max_tokens, delivered + output_estimate)
    blocks = blocks_for(model.block_size, ticket.num_prompt_tokens, output, ticket.n)
    return min(ticket.n, worker.max_sequences), min(blocks, model.num_blocks)


def room(worker: Worker, model: ServedModel, latency_class: int, *, preemptible: bool = False) -> tuple[int, int]:
    """(slots, blocks) that a class may take: what is free and, where engines preempt by class, what lower classes hold."""
    last = latency_class if preemptible else BATCH
    return worker.max_slots - sum(worker.used_slots[: last + 1]), model.num_blocks - sum(worker.used_blocks[: last + 1])


@dataclass
class _Sketch:
    """The fleet as it will be once the placements so far are committed."""

    workers: dict[str, Worker]
    kept: set[str] = field(default_factory=set)
    """Workers that a ticket waits for: nothing behind it may take what room they gain, or a big ticket would wait for ever."""


def plan(tickets: Iterable[Ticket], workers: Iterable[Worker], rules: Rules) -> list[Placement]:
    """Placements for as many tickets as have room, in order. A ticket that has none keeps the worker closest to having it."""
    sketch = _Sketch({worker.worker_id: worker for worker in workers})
    placements = []
    for ticket in tickets:
        if len(sketch.kept) == len(sketch.workers):
            break
        placement = _place(ticket, sketch, rules)
        if placement is not None:
            placements.append(placement)
    return placements


def _place(ticket: Ticket, sketch: _Sketch, rules: Rules) -> Placement | None:
    candidates = [w for w in sketch.workers.values() if could_hold(w, ticket)]
    reachable = [w for w in candidates if w.worker_id not in ticket.excluded_workers]
    # Excluded workers are left out while there are others. Alone they are better than nothing, if they live on for a while.
    if not reachable and ticket.asked_seconds < rules.exclusion_seconds:
        return None
    candidates = reachable or candidates
    candidates = [w for w in candidates if w.worker_id not in sketch.kept]
    fits = [placement for w in candidates if (placement := _fit(ticket, w, rules)) is not None]
    if not fits:
        if candidates:
            sketch.kept.add(max(candidates, key=lambda w: _spare(w, ticket, rules)).worker_id)
        return None
    best = min(fits, key=_load)
    sketch.workers[best.worker.worker_id] = _debit(best)
    return best


def _fit(ticket: Ticket, worker: Worker, rules: Rules) -> Placement | None:
    model = worker.models[ticket.model]
    slots, blocks = needs(ticket, worker, model, rules.output_estimate)
    free_slots, free_blocks = room(worker, model, ticket.latency_class, preemptible=rules.preemptible)
    if slots > free_slots or blocks > free_blocks:
        return None
    return Placement(ticket, worker, slots, blocks, model.num_blocks)


def _spare(worker: Worker, ticket: Ticket, rules: Rules) -> tuple[int, int, str]:
    slots, blocks = room(worker, worker.models[ticket.model], ticket.latency_class, preemptible=rules.preemptible)
    return blocks, slots, worker.worker_id


def _load(placement: Placement) -> tuple[float, float, str]:
    worker = placement.worker
    return sum(worker.used_slots) / worker.max_sequences, sum(worker.used_blocks) / placement.max_blocks, worker.worker_id


def _debit(placement: Placement) -> Worker:
    worker, latency_class = placement.worker, placement.ticket.latency_class
    slots = tuple(used + (placement.num_slots if c == latency_class else 0) for c, used in enumerate(worker.used_slots))
    blocks = tuple(used + (placement.num_blocks if c == latency_class else 0) for c, used in enumerate(worker.used_blocks))
    return replace(worker, used_slots=slots, used_blocks=blocks)


def impossible(ticket: Ticket, workers: Iterable[Worker]) -> tuple[str, str] | None:
    """(field, words) if no worker of the model could hold this ticket even when empty; None if one could, or none serves it."""
    models = [model for worker in workers if (model := serves(worker, ticket)) is not None]
    if not models:
        return None
    prompt, total = ticket.num_prompt_tokens, ticket.num_prompt_tokens + ticket.max_tokens
    longest = max(model.max_model_len for model in models)
    if prompt > longest:
        return "prompt", f"the prompt has {prompt} tokens; {ticket.model} takes at most {longest}: shorten it"
    if total > longest:
        return (
            "max_tokens",
            f"{prompt} prompt tokens + max_tokens {ticket.max_tokens} is {total}; {ticket.model} takes at most {longest} in all: "
            f"set max_tokens to at most {longest - prompt} or shorten the prompt",
        )
    return None
