"""Rules of other systems, for comparison alone: what they count, put to the same nodes. No service knows them."""

import random
from collections.abc import Callable, Sequence

from services.scheduler.policy.routing import Cost, Offer, Routing


def rivals(seed: int) -> dict[str, Routing]:
    """By name. Random choices come from the seed."""
    rng = random.Random(seed)
    rules: dict[str, Callable[[Offer], float]] = {
        "random": lambda _: rng.random(),
        # LMetric: prompt tokens to compute times batch size.
        "lmetric": lambda o: (o.backlog_tokens + o.num_new_tokens) * (o.num_sequences + 1),
        # Dynamo's router at its defaults: blocks to compute plus blocks that decode.
        "dynamo": lambda o: (o.backlog_tokens + o.num_new_tokens) / o.model.block_size + sum(o.worker.used_blocks),
    }
    return {name: Routing(name, ("cost",), _each(rule)) for name, rule in rules.items()}


def _each(rule: Callable[[Offer], float]) -> Callable[[Sequence[Offer]], list[Cost]]:
    return lambda offers: [(rule(offer),) for offer in offers]
