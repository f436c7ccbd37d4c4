"""Simulated devices that hold two of four models: requests go where their model is, and nobody is forgotten."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from bench.fleet.devices import H100, SMALL
from bench.fleet.mesh import Arrival, Mesh
from bench.fleet.scenario import node_of
from bench.fleet.shared import SharedNode
from bench.fleet.trace import Row
from services.scheduler.policy.routing import SECONDS, Cost, Offer, Routing
from services.scheduler.policy.rules import Rules
from services.worker.sharing.residency import MIN_STAY_SECONDS

MODELS = [replace(SMALL, name=f"m{number}") for number in range(4)]
BYTES_PER_SECOND = SMALL.weight_bytes  # a second each


def _nodes(count: int) -> list[SharedNode]:
    sizes = {model.name: model.weight_bytes for model in MODELS}
    return [
        SharedNode(
            f"n{i}",
            [node_of(f"n{i}/{model.name}", H100, model, 30.0) for model in MODELS],
            sizes,
            num_places=2,
            bytes_per_second=BYTES_PER_SECOND,
        )
        for i in range(count)
    ]


def _arrivals(count: int, per_second: float) -> list[Arrival]:
    rng = random.Random(1)
    now, made = 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_second)
        made.append(Arrival(Row(now, rng.randrange(100, 2000), rng.randrange(5, 60)), rng.choice(MODELS).name))
    return made


def _blind(offers: Sequence[Offer]) -> list[Cost]:
    """The same rule, not told where weights are."""
    seeing = [replace(o, worker=replace(o.worker, node=replace(o.worker.node, absent={}))) for o in offers]
    return SECONDS.costs(seeing)


def test_requests_go_where_their_model_is() -> None:
    arrivals = _arrivals(400, per_second=8.0)
    seeing, blind = _nodes(3), _nodes(3)
    seen = Mesh(seeing, Rules()).run(arrivals)
    unseen = Mesh(blind, Rules(routing=Routing("blind", SECONDS.terms, _blind))).run(arrivals)
    assert len(seen.ttft) == len(unseen.ttft) == 400
    assert fmean(seen.ttft) < fmean(unseen.ttft) / 2
    assert sum(node.num_loads for node in seeing) < sum(node.num_loads for node in blind) / 2


@pytest.mark.parametrize("per_second", [0.5, 20.0])
def test_all_are_answered_within_the_bound_of_loads(per_second: float) -> None:
    arrivals = _arrivals(200, per_second)
    (node,) = nodes = _nodes(1)
    outcome = Mesh(nodes, Rules()).run(arrivals)
    assert len(outcome.ended_at) == 200
    assert not node.jobs
    assert min(outcome.ttft) > 0
    for resident in node.residency.residents.values():
        assert resident.num_loads <= max(outcome.ended_at) / MIN_STAY_SECONDS + 1
