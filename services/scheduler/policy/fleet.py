"""The fleet as the policy sees it: workers with their room, and what a ticket would take of it. Chooses nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.policy.classes import BATCH
from services.policy.org import OrgPolicy
from services.scheduler.policy.node import NodeState
from services.scheduler.policy.order import Ticket


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
    node: NodeState = field(default_factory=NodeState)


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


def needs(ticket: Ticket, worker: Worker, model: ServedModel, org: OrgPolicy, output_estimate: int) -> tuple[int, int]:
    """(slots, blocks) to reserve. Never more than the whole worker has, or the org's share of it, so that what fits there is placeable."""
    delivered = -(-ticket.num_delivered_tokens // ticket.n)
    output = min(ticket.max_tokens, delivered + output_estimate)
    blocks = blocks_for(model.block_size, ticket.num_prompt_tokens, output, ticket.n)
    return min(ticket.n, worker.max_sequences), min(blocks, share_blocks(model.num_blocks, org))


def room(worker: Worker, model: ServedModel, latency_class: int, *, preemptible: bool) -> tuple[int, int]:
    """(slots, blocks) that a class may take: what is free and, where engines preempt by class, what lower classes hold."""
    last = latency_class if preemptible else BATCH
    return worker.max_slots - sum(worker.used_slots[: last + 1]), model.num_blocks - sum(worker.used_blocks[: last + 1])


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
