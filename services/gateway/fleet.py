"""Keeps what is known of the models true: asks a scheduler for the fleet each second. Knows no request."""

import asyncio
import time
from collections.abc import Callable

from forebay.v1 import admin_pb2
from services.common import log
from services.common.errors import StatusError
from services.gateway.mesh import Mesh
from services.gateway.models import Models
from services.gateway.orgs import Orgs

_log = log.get(__name__)

STALE_SECONDS = 5.0


class FleetWatch:
    """The gateway's view of the fleet, at most a few seconds old while a scheduler answers."""

    def __init__(
        self, mesh: Mesh, models: Models, orgs: Orgs, *, interval_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mesh = mesh
        self._models = models
        self._orgs = orgs
        self._interval = interval_seconds
        self._clock = clock
        self._seen_at: float | None = None
        self._problem = "no scheduler has answered yet"

    async def see(self) -> admin_pb2.GetFleetResponse:
        """The fleet now, which is this gateway's view from here on. Raises UNAVAILABLE where no scheduler answers."""
        fleet = await self._mesh.fleet()
        self._problem = ""
        self._seen_at = self._clock()
        self._models.update_fleet(fleet)
        self._orgs.know(fleet.policies)
        return fleet

    async def look(self) -> None:
        """Asks once. A failure leaves the last view, and is the reason for not being ready once that is too old."""
        try:
            await self.see()
        except StatusError as error:
            if not self._problem:
                _log.warning("fleet_unknown", why=error.message)
            self._problem = error.message

    async def run(self) -> None:
        """Asks for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    def why_not_ready(self) -> str | None:
        """None when a scheduler answers and some model can be used."""
        if self._seen_at is None or self._clock() - self._seen_at > STALE_SECONDS:
            return self._problem or f"the fleet was last seen more than {STALE_SECONDS:g} s ago"
        if not any(model.ready for model in self._models.list()):
            return "no worker serves any of this gateway's models yet"
        return None
