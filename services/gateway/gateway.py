"""What both faces work with, put together once: who may call, which models there are, and the mesh behind them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.common.errors import unavailable
from services.gateway.auth import Authenticator
from services.gateway.catalogue import Catalogue
from services.gateway.fleet import FleetWatch
from services.gateway.latency import LatencyClass, deadlines
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics
from services.gateway.orgs import Orgs
from services.policy.watched import PolicyFile


class OpenCalls:
    """Bounds the calls that both faces have open, waiting ones included: a flood is refused before its bodies are held."""

    def __init__(self, most: int = 2048) -> None:
        self._most = most
        self._num_open = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A call's time. Raises UNAVAILABLE where there are too many."""
        if self._num_open >= self._most:
            raise unavailable(f"this gateway has {self._most} calls open, the most that it takes: try again", reason="TOO_MANY_CALLS")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


@dataclass
class Gateway:
    """One gateway's parts. `draining` is set once, when it is about to go."""

    authenticator: Authenticator
    catalogue: Catalogue
    mesh: Mesh
    orgs: Orgs
    fleet: FleetWatch
    metrics: GatewayMetrics
    calls: OpenCalls = field(default_factory=OpenCalls)
    max_tokens_cap: int = 32_768
    policy: PolicyFile = field(default_factory=lambda: PolicyFile(None))
    slow_reader_seconds: float = 30.0
    """A client that takes nothing for so long is given up; until then only its own stream waits."""
    draining: bool = False
    wake_runner: Callable[[], None] = lambda: None
    """Tells the runner of jobs that there is work."""

    @property
    def deadlines(self) -> Mapping[LatencyClass, float]:
        """Seconds that requests of each class have where they name none, as the policy stands now."""
        return deadlines(self.policy.policy.classes)

    def why_not_ready(self) -> str | None:
        """None when it takes work."""
        return "draining" if self.draining else self.fleet.why_not_ready()
