"""By what a worker is chosen: each rule gives every worker that has room a cost, and the least cost wins. Pure arithmetic.

`seconds`, the default, adds up in seconds what a placement costs the request and the others. `paper` is the source paper's rule. The
others know less: `prefix` no speed, `least_loaded` no prompt, `round_robin` no load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.policy.fleet import ServedModel, Worker
from services.scheduler.policy.node import StepCost, full_rate, thermal_factor
from services.scheduler.policy.order import Ticket

Cost = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker that has room for a ticket, and what the scheduler knows of both."""

    ticket: Ticket
    worker: Worker
    model: ServedModel
    num_slots: int
    num_blocks: int
    num_expected_tokens: int
    """Output tokens that it will probably generate, over all choices."""
    num_found_tokens: int = 0
    """Of the prompt, that the worker has."""
    backlog_tokens: float = 0.0
    """Of other prompts, that it has still to compute."""
    distance_seconds: float = 0.0
    """From the gateway's region to the worker's and back."""
    turn: int = 0
    """Number of the last placement that went there, 0: none has."""

    @property
    def num_new_tokens(self) -> int:
        """To compute before its first token. One at least: computing it gives the answer."""
        return max(1, self.ticket.num_prompt_tokens + self.ticket.num_delivered_tokens - self.num_found_tokens)

    @property
    def weights_seconds(self) -> float:
        """Until the model's weights are on the device; 0: they are. What others there bring meanwhile isn't known."""
        return self.worker.node.absent.get(self.ticket.model, 0.0)

    @property
    def num_sequences(self) -> int:
        """In the steps that it would take part in, without it."""
        return min(sum(self.worker.used_slots), self.worker.max_sequences)


@dataclass(frozen=True)
class Routing:
    """`terms` name the parts of a cost, in the order in which they count. `costs` gives those of all workers that have room."""

    name: str
    terms: tuple[str, ...]
    costs: Callable[[Sequence[Offer]], list[Cost]]


def displaced(offer: Offer) -> tuple[float, float]:
    """(choices that would wait for a slot, share of slots plus share of blocks that lower classes would lose)."""
    w = offer.worker
    num_waiting = max(0, sum(w.used_slots[: offer.ticket.latency_class + 1]) + offer.num_slots - w.max_sequences)
    slots = _lacking(offer.num_slots, sum(w.used_slots), w.max_sequences)
    return num_waiting, slots + _lacking(offer.num_blocks, sum(w.used_blocks), offer.model.num_blocks)


def _lacking(wanted: int, used: int, whole: int) -> float:
    """Share of the whole that isn't free and would have to be taken from others."""
    return min(wanted, max(0, used + wanted - whole)) / whole


# --- seconds

LATER = 1 / 32
"""What a second that is spread over an output counts beside one before the first token: a reader hardly sees it. As found by simulation,
one number for all traces: with 1 prompts would go to idle slow workers rather than wait a little for a fast one."""
COLD_TOKENS_PER_SECOND = 1000.0
"""Of a worker whose step time isn't known yet."""


def _seconds(offers: Sequence[Offer]) -> list[Cost]:
    """While a worker's step time isn't known: prompt tokens to compute times the sequences that they hold up."""
    if any(offer.worker.node.step is None for offer in offers):
        return [
            (*displaced(offer), *_in_tokens(offer), 0.0, offer.weights_seconds, 0.0, 0.0, 0.0, offer.distance_seconds) for offer in offers
        ]
    return [_in_seconds(offer, offer.worker.node.step) for offer in offers if offer.worker.node.step is not None]


def _in_tokens(offer: Offer) -> Cost:
    """(tokens, with those that could be computed while weights come; seconds)"""
    tokens = (offer.backlog_tokens + offer.num_new_tokens) * (offer.num_sequences + 1.0)
    return tokens + COLD_TOKENS_PER_SECOND * offer.weights_seconds, offer.weights_seconds + offer.distance_seconds


def _in_seconds(offer: Offer, step: StepCost) -> Cost:
    """Queue, weights and prefill until its first token, load until its last one, and what both make the others wait."""
    node, num_others = offer.worker.node, offer.num_sequences
    factor, num_new, num_output = thermal_factor(node), offer.num_new_tokens, offer.num_expected_tokens
    length = offer.ticket.num_prompt_tokens + offer.ticket.num_delivered_tokens
    decoding = step.seconds(num_others, num_others, sum(offer.worker.used_blocks) * offer.model.block_size)
    room = max(1.0, node.max_step_tokens - num_others)
    queue = (step.token * offer.backlog_tokens + decoding * offer.backlog_tokens / room) / factor
    own = step.token * num_new + step.row + step.key * (length + offer.num_found_tokens) / 2 * max(1.0, num_new / room)
    prefill = (own + decoding * max(1.0, num_new / room)) / factor
    one_more = step.seconds(1, 1, length + num_output / 2) - step.fixed
    load = LATER * num_output * (decoding + one_more) / factor
    slowdown = LATER * num_others * (own + num_output * one_more) / factor
    weights = offer.weights_seconds
    total = queue + weights + prefill + load + slowdown + offer.distance_seconds
    return *displaced(offer), 0.0, total, queue, weights, prefill, load, slowdown, offer.distance_seconds


# --- the paper's rule

UTILIZATION_SECONDS = 0.5
LEAST_HEALTH = 0.2


def _paper(offers: Sequence[Offer]) -> list[Cost]:
    """alpha L + beta U + gamma C_load where the model isn't loaded, in seconds, as SPEC 4 settles it.

    A worker that is less healthy than LEAST_HEALTH comes behind all others.
    """
    return [_by_paper(offer) for offer in offers]


def _by_paper(offer: Offer) -> Cost:
    node = offer.worker.node
    rate = full_rate(node) or COLD_TOKENS_PER_SECOND
    factor = thermal_factor(node, foresight_seconds=0.0)
    latency = (offer.backlog_tokens + offer.ticket.num_prompt_tokens + offer.num_expected_tokens) / (rate * factor)
    load = UTILIZATION_SECONDS * node.utilization
    return float(paper_health(offer.worker) < LEAST_HEALTH), latency + load + offer.weights_seconds, latency, load, offer.weights_seconds


def paper_health(worker: Worker) -> float:
    """h_g = .3 (1 - U) + .3 M_free / M_total + .1 (1 - T / T_max) + .3 / (1 + Q); a device without a sensor counts as cold."""
    node = worker.node
    warmth = min(1.0, (node.temperature_celsius or 0.0) / node.slowdown_celsius)
    return 0.3 * (1 - node.utilization) + 0.3 * node.memory_free + 0.1 * (1 - warmth) + 0.3 / (1 + node.num_queued)


# --- what knows less


def _prefix(offers: Sequence[Offer]) -> list[Cost]:
    return [(*displaced(o), o.num_new_tokens * (o.num_sequences + 1.0), *_loads(o)) for o in offers]


def _least_loaded(offers: Sequence[Offer]) -> list[Cost]:
    return [(*displaced(o), *_loads(o)) for o in offers]


def _loads(offer: Offer) -> Cost:
    """Slots in use, at most all; those of this class and more urgent ones, unbounded; blocks in use. Shares of the worker's."""
    w = offer.worker
    rivals = sum(w.used_slots[: offer.ticket.latency_class + 1]) / w.max_sequences
    return min(1.0, sum(w.used_slots) / w.max_sequences), rivals, sum(w.used_blocks) / offer.model.num_blocks


def _round_robin(offers: Sequence[Offer]) -> list[Cost]:
    return [(*displaced(o), float(o.turn)) for o in offers]


_DISPLACED, _LOADS = ("waiting", "preempted"), ("load", "rivals", "cache")
SECONDS: Routing = Routing(
    "seconds",
    (
        *_DISPLACED,
        "tokens",
        "seconds",
        "queue_seconds",
        "weights_seconds",
        "prefill_seconds",
        "load_seconds",
        "slowdown_seconds",
        "network_seconds",
    ),
    _seconds,
)
ROUTINGS: Mapping[str, Routing] = {
    routing.name: routing
    for routing in (
        SECONDS,
        Routing("paper", ("unhealthy", "seconds", "latency_seconds", "utilization_seconds", "weights_seconds"), _paper),
        Routing("prefix", (*_DISPLACED, "prefill", *_LOADS), _prefix),
        Routing("least_loaded", (*_DISPLACED, *_LOADS), _least_loaded),
        Routing("round_robin", (*_DISPLACED, "turn"), _round_robin),
    )
}
