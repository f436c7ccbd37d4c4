"""What an operator may set about a scheduler."""

import os
import socket
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from services.common.settings import HostPort, ServiceSettings, listed

FAR_SECONDS = 0.1
"""Between two regions of which the operator has said nothing."""


def parse_distances(value: str) -> dict[frozenset[str], float]:
    """Seconds by pair of regions. ValueError names what can't be read."""
    distances = {}
    for part in listed(value):
        pair, _, seconds = part.partition("=")
        here, _, there = pair.partition("/")
        try:
            distance = float(seconds)
        except ValueError:
            distance = -1.0
        if not here or not there or not 0 <= distance < 60:
            raise ValueError(f"{part} isn't REGION/REGION=SECONDS with 0 to 60 seconds")
        distances[frozenset((here, there))] = distance
    return distances


def _distances(value: str) -> str:
    parse_distances(value)
    return value


Distances = Annotated[str, AfterValidator(_distances)]


class SchedulerSettings(ServiceSettings):
    """FOREBAY_* of a scheduler. Times are seconds."""

    listen_address: HostPort = Field("127.0.0.1:50052", description="host:port of SchedulerService and AdminService")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss:// (with ?ssl_ca_certs=FILE for a CA of your own) or unix:// URL of Redis 7.2, Valkey 8, or later",
    )
    redis_password_file: Path | None = Field(None, description="file with the password of Redis, for a redis_url that holds none")
    policy_file: Path | None = Field(
        None, description="YAML file of orgs, tiers, classes and models, read again when it changes; without: no limits"
    )
    scheduler_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", description="name of this scheduler, for people"
    )
    redis_timeout_seconds: float = Field(0.5, gt=0, le=5, description="longest wait for one answer of Redis")
    redis_wait_seconds: float = Field(10, ge=0, description="how long to wait for Redis at the start")
    max_queued: int = Field(4096, ge=1, description="tickets waiting for one model before the least urgent, newest first, are shed")
    preemption: bool = Field(True, description="whether a request may take room that less urgent ones hold on a worker")
    queue_order: Literal["fair", "arrival"] = Field("fair", description="fair: class, org, arrival; arrival: that alone, for comparisons")
    routing: Literal["seconds", "paper", "prefix", "least_loaded", "round_robin"] = Field(
        "seconds",
        description="what is least where a request goes. seconds: what it and the others wait for it, by each worker's step times; "
        "prefix: tokens left to compute, by load; least_loaded: load; round_robin: nothing; paper: the paper's rule, for comparisons",
    )
    distances: Distances = Field(
        "", description="A/B=SECONDS[,...]: round trips between regions; two that aren't named here cost 0.1, an empty one nothing"
    )
    prefetch: bool = Field(
        True, description="whether models that requests wait for are brought to devices ahead, where others are idle there"
    )
    output_estimate_tokens: int = Field(256, ge=1, description="most output tokens per choice to reserve cache for at placement")
    no_worker_seconds: float = Field(5, ge=0, description="how long a ticket waits while no worker serves its model")
    liveness_seconds: float = Field(3, gt=0, description="a worker whose last heartbeat is older takes no new work")
    lease_seconds: float = Field(10, gt=0, description="a lease that no heartbeat has listed for so long has expired")
    start_seconds: float = Field(3.5, gt=0, description="a lease must be listed within so long: 2 s to start and a heartbeat's slack")
    stream_gone_seconds: float = Field(5, gt=0, description="a queued ticket without a Place stream for so long is dropped")
    default_deadline_seconds: float = Field(600, gt=0, description="for tickets that come without a deadline")
    max_file_bytes: int = Field(64 << 20, ge=1, description="size of one file of a batch job")
    org_storage_bytes: int = Field(256 << 20, ge=1, description="files and results that one org may keep in Redis; its jobs wait when full")
    storage_bytes: int = Field(1 << 30, ge=1, description="the same of all orgs together; Redis keeps all of it in memory")
    file_retention_seconds: int = Field(86_400, ge=1, description="how long files are kept, and jobs and their results after their end")
    idempotency_seconds: float = Field(3600, gt=0, description="how long a request's idempotency key is kept after the request's end")
    idempotency_keys: int = Field(10_000, ge=1, description="idempotency keys of one org that are kept, the latest; each is some 600 bytes")
    poll_seconds: float = Field(1, gt=0, description="how often to look without having been woken, and to keep house")

    @cached_property
    def _seconds_apart(self) -> dict[frozenset[str], float]:
        return parse_distances(self.distances)

    def distance(self, here: str, there: str) -> float:
        """Seconds from one region to another and back; see `distances`."""
        if not here or not there or here == there:
            return 0.0
        return self._seconds_apart.get(frozenset((here, there)), FAR_SECONDS)
