"""A node of several models whose weights don't all fit: the real residency on a virtual clock, over one Node for each model.

Models on the device step as if each were alone there: simulated is who is where, not how steps share a device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.fleet.node import FOREVER, Job, Node
from services.scheduler.policy.node import NodeState
from services.worker.sharing.residency import ALIGNMENT, Place, Residency

STANDARD = 2
LOOK_SECONDS = 0.1
"""So often a model that waits looks for room."""


class SharedNode:
    """As a Node to its mesh, which tells `take` the model by the job."""

    def __init__(
        self, name: str, nodes: Sequence[Node], weight_bytes: Mapping[str, float], *, num_places: int, bytes_per_second: float
    ) -> None:
        """A node for each model, by whose names `weight_bytes` are. Room for the weights of `num_places` of the largest, at that rate."""
        self.name = name
        self.nodes = {node.model: node for node in nodes}
        self.engine = nodes[0].engine
        self.residency = Residency(int(num_places * max(weight_bytes.values())) + ALIGNMENT * len(nodes))
        self.residency.bytes_per_second = bytes_per_second
        self.served = {model: node.engine.num_blocks for model, node in self.nodes.items()}
        self.until = FOREVER
        self._bytes_per_second = bytes_per_second
        self._held: dict[str, list[Job]] = {model: [] for model in self.nodes}
        self._arrives = FOREVER
        self._coming = ""
        for model, node in self.nodes.items():
            self.residency.add(model, int(weight_bytes[model]))
            node.warm_up()

    @property
    def jobs(self) -> dict[str, Job]:
        """All that it has."""
        jobs = {job.request_id: job for held in self._held.values() for job in held}
        return jobs | {request_id: job for node in self.nodes.values() for request_id, job in node.jobs.items()}

    @property
    def num_running(self) -> int:
        """Sequences in steps."""
        return sum(node.num_running for node in self.nodes.values())

    @property
    def num_context_tokens(self) -> int:
        """Of those that decode."""
        return sum(node.num_context_tokens for node in self.nodes.values())

    @property
    def num_hit_tokens(self) -> int:
        """Of prompts, found."""
        return sum(node.num_hit_tokens for node in self.nodes.values())

    @property
    def num_loads(self) -> int:
        """Times that a model was brought."""
        return sum(resident.num_loads for resident in self.residency.residents.values())

    @property
    def slowed_seconds(self) -> float:
        """In which it was too hot, by the model that had most."""
        return max(node.slowed_seconds for node in self.nodes.values())

    def take(self, job: Job, now: float) -> None:
        """A request has come; it waits for its model."""
        if self._is_there(job.model):
            self.nodes[job.model].take(job, now)
        else:
            self._held[job.model].append(job)
        self._move(now)

    def turn(self, now: float) -> tuple[list[Job], list[Job]]:
        """See Node.turn."""
        firsts: list[Job] = []
        ended: list[Job] = []
        if now >= self._arrives:
            self.residency.arrived(self._coming, self.residency.residents[self._coming].num_bytes / self._bytes_per_second)
            self._arrives = FOREVER
            self.nodes[self._coming].resume(now)
            for job in self._held[self._coming]:
                self.nodes[self._coming].take(job, now)
            self._held[self._coming].clear()
        for node in self.nodes.values():
            if node.until <= now:
                came, left = node.turn(now)
                firsts += came
                ended += left
        self._move(now)
        return firsts, ended

    def state(self, now: float) -> tuple[NodeState, int]:
        """See Node.state: the slowest model's step time, and what must come for each that isn't there."""
        told = [node.state(now) for node in self.nodes.values()]
        slowest = max((state for state, _ in told), key=lambda state: math.inf if state.step is None else state.step.fixed)
        lacking = sum(tokens for _, tokens in told) + sum(job.num_prompt_tokens for held in self._held.values() for job in held)
        absent = {model: self._seconds_to_load(model, now) for model in self.nodes if not self._is_there(model)}
        return replace(slowest, absent=absent), lacking

    def _is_there(self, model: str) -> bool:
        return self.residency.residents[model].place is Place.DEVICE

    def _seconds_to_load(self, model: str, now: float) -> float:
        if model == self._coming and self._arrives < FOREVER:
            return max(0.0, self._arrives - now)
        return self.residency.seconds_to_load(model) or 0.0

    def _move(self, now: float) -> None:
        work = {model: STANDARD for model, node in self.nodes.items() if node.jobs or self._held[model]}
        if (move := self.residency.next(work, now)) is not None:
            for victim in move.evicted:
                self.nodes[victim].pause(now)
            self._coming = move.model
            self._arrives = now + self.residency.residents[move.model].num_bytes / self._bytes_per_second
        waits = any(not self._is_there(model) for model in work) and self._arrives == FOREVER
        self.until = min(self._arrives, now + LOOK_SECONDS if waits else FOREVER, *(node.until for node in self.nodes.values()))
