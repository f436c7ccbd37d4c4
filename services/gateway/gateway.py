"""What both faces work with, put together once: who may call, which models there are, and the mesh behind them."""

from dataclasses import dataclass

from services.gateway.auth import Authenticator
from services.gateway.fleet import FleetWatch
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Catalogue


@dataclass
class Gateway:
    """One gateway's parts. `draining` is set once, when it is about to go."""

    authenticator: Authenticator
    catalogue: Catalogue
    mesh: Mesh
    fleet: FleetWatch
    metrics: GatewayMetrics
    max_tokens_cap: int = 32_768
    slow_reader_seconds: float = 30.0
    """A client that takes nothing for so long is given up; until then only its own stream waits (F15)."""
    draining: bool = False

    def why_not_ready(self) -> str | None:
        """None when it takes work."""
        return "draining" if self.draining else self.fleet.why_not_ready()
