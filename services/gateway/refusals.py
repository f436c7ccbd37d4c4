"""Acts that were refused to those who are no operators: in the log at once, and at a scheduler for the audit."""

import asyncio

import grpc

from forebay.v1 import scheduler_pb2
from services.common import log
from services.common.errors import StatusError
from services.gateway.auth import Caller
from services.gateway.mesh import Mesh

_log = log.get(__name__)
AGAIN_SECONDS = 10.0
"""The same act of the same caller is noted once in so long."""
_MOST_NOTED = 1_000
_MOST_AT_ONCE = 64
_SECONDS = 2.0


class Refusals:
    """Notes in the background: nobody waits for it, and a flood of them is bounded."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._noted: dict[tuple[str, str], float] = {}
        self._notes: set[asyncio.Task[None]] = set()

    def require_operator(self, caller: Caller, act: str) -> None:
        """PERMISSION_DENIED, noted, for others."""
        try:
            caller.require("operator")
        except StatusError:
            _log.warning("act_refused", act=act, actor=caller.actor)
            self._note(caller.actor, act)
            raise

    def _note(self, actor: str, act: str) -> None:
        now = self._mesh.clock()
        self._noted = {key: at for key, at in self._noted.items() if now - at < AGAIN_SECONDS}
        if (actor, act) in self._noted or len(self._noted) >= _MOST_NOTED or len(self._notes) >= _MOST_AT_ONCE:
            return
        self._noted[actor, act] = now
        task = asyncio.create_task(self._tell(scheduler_pb2.NoteRefusalRequest(actor=actor, act=act)))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _tell(self, note: scheduler_pb2.NoteRefusalRequest) -> None:
        try:
            await self._mesh.ask(lambda scheduler: scheduler.stub.NoteRefusal(note, timeout=_SECONDS))
        except (StatusError, grpc.RpcError) as error:
            _log.warning("refusal_not_noted", act=note.act, why=str(error))
