"""What is simulated: a mixed fleet, a stretch of a trace spread over its models, and arrivals at 80 % of its capacity."""

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.fleet.devices import A100, EMBEDDING, H100, LARGE, SMALL, Device, Model, Thermals, cache_tokens, law
from bench.fleet.mesh import Arrival, Mesh
from bench.fleet.node import Engine, Node
from bench.fleet.trace import BLOCK_TOKENS, Row, window
from services.scheduler.policy.routing import ROUTINGS
from services.scheduler.policy.rules import Rules

UTILIZATION = 0.8
SHAPE: tuple[tuple[Device, Model, int], ...] = (
    (H100, SMALL, 4),
    (A100, SMALL, 4),
    (H100, LARGE, 4),
    (A100, LARGE, 2),
    (A100, EMBEDDING, 2),
)
"""Of 16 nodes."""
EMBEDDING_SHARE, EMBEDDING_TOKENS = 0.05, 512
COOL_CELSIUS, WARM_CELSIUS, WARM_EACH = 30.0, 38.0, 4
"""Air around the nodes; each so many'th stands where it is warm."""
NUM_PROBES = 60
"""Requests per node by which its capacity is found."""


@dataclass(frozen=True)
class Scenario:
    """A fleet and what comes to it."""

    num_nodes: int
    arrivals: Sequence[Arrival]

    def nodes(self) -> list[Node]:
        """Idle ones."""
        return nodes(self.num_nodes)


def nodes(count: int) -> list[Node]:
    """So many idle nodes, a multiple of 16."""
    made = []
    for device, model, share in SHAPE:
        for number in range(share * count // 16):
            air = WARM_CELSIUS if number % WARM_EACH == WARM_EACH - 1 else COOL_CELSIUS
            node = node_of(f"{model.name}-{device.name}-{number}", device, model, air)
            node.warm_up()
            made.append(node)
    return made


def node_of(name: str, device: Device, model: Model, air_celsius: float) -> Node:
    """One that knows no step time yet."""
    return Node(name, model.name, law(device, model), Engine(cache_tokens(device, model) // BLOCK_TOKENS), Thermals(device, air_celsius))


def scenario(rows: Sequence[Row], *, num_nodes: int, num_requests: int, seed: int) -> Scenario:
    """A stretch of the trace that the seed chooses, in its own rhythm, so fast that the fleet is UTILIZATION busy."""
    rng = random.Random(seed)
    taken = window(rows, rng.randrange(len(rows)), num_requests)
    capacity = _capacity(taken)
    scale = num_nodes / 16
    arrivals = _spread(taken, capacity, rng)
    rate = UTILIZATION * scale * min(capacity[model] / share for model, share in _shares(arrivals).items() if model in capacity)
    pace = num_requests / rate / max(taken[-1].at, 1e-9)
    return Scenario(num_nodes, [replace(a, row=replace(a.row, at=a.row.at * pace)) for a in arrivals])


def _capacity(rows: Sequence[Row]) -> dict[str, float]:
    """Requests per second that 16 nodes do of each model that generates, when there are always more of them."""
    fleet, rates = nodes(16), {}
    for model in (SMALL, LARGE):
        serving = [node for node in fleet if node.model == model.name]
        probes = [Arrival(replace(row, at=0.0), model.name) for row in rows[: NUM_PROBES * len(serving)]]
        ended = sorted(Mesh(serving, Rules(routing=ROUTINGS["prefix"])).run(probes).ended_at)
        most = int(len(ended) * 0.8)  # behind that the fleet empties
        rates[model.name] = most / ended[most - 1]
    return rates


def _spread(rows: Sequence[Row], capacity: dict[str, float], rng: random.Random) -> list[Arrival]:
    """Sessions stay with one model; models get requests as they have capacity."""
    share, arrivals = capacity[SMALL.name] / sum(capacity.values()), []
    for row in rows:
        lot = rng.random() if row.session is None else (zlib.crc32(f"{row.session}".encode()) % 10_000) / 10_000
        if rng.random() < EMBEDDING_SHARE:
            row = replace(row, num_prompt_tokens=min(row.num_prompt_tokens, EMBEDDING_TOKENS), num_output_tokens=1, blocks=())
            arrivals.append(Arrival(row, EMBEDDING.name))
        else:
            arrivals.append(Arrival(row, SMALL.name if lot < share else LARGE.name))
    return arrivals


def _shares(arrivals: Sequence[Arrival]) -> dict[str, float]:
    counts = Counter(arrival.model for arrival in arrivals)
    return {model: count / len(arrivals) for model, count in counts.items()}
