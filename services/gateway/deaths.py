"""Workers that died under one request: whether it may be what they die of, and whose word on that it has to wait for. Pure."""

from dataclasses import dataclass, field

from forebay.v1 import scheduler_pb2

SAME_PLACE_TOKENS = 32
"""A worker may have been so many tokens further than its client when it died."""

_ALIVE = ("DRAINING", "DRAINED")
"""Reasons by which a worker that is going sends a request elsewhere."""


@dataclass
class Deaths:
    """Of the workers of one request, in order."""

    _deaths: list[tuple[scheduler_pb2.Lease, int]] = field(default_factory=list)

    def lost(self, lease: scheduler_pb2.Lease, num_tokens: int, reason: str) -> None:
        """It was running there and had so many tokens when the worker was lost, by `reason` where the worker gave one."""
        if reason not in _ALIVE:
            self._deaths.append((lease, num_tokens))

    @property
    def suspect(self) -> bool:
        """Whether it ran where a worker died."""
        return bool(self._deaths)

    @property
    def awaited(self) -> list[scheduler_pb2.DeadWorker]:
        """The last two, if the second died about where the first did: by what was in their last steps it is cleared or not."""
        last = self._deaths[-2:]
        if len(last) < 2 or last[1][1] - last[0][1] > SAME_PLACE_TOKENS:
            return []
        return [scheduler_pb2.DeadWorker(worker_id=lease.worker_id, incarnation=lease.incarnation) for lease, _ in last]
