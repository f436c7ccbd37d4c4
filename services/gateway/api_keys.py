"""API keys: whose one is, asked for at a scheduler by its hash alone and known for some seconds. The key itself goes nowhere."""

import time
from collections.abc import Callable

from forebay.v1 import scheduler_pb2
from services.common.errors import Code, StatusError
from services.gateway.answers import Answers, Keeping
from services.gateway.auth import ROLES, Caller, refused
from services.gateway.mesh import Mesh
from services.policy import api_key

_ASK_SECONDS = 1.0
_NOBODYS = "it is no API key that is known here: it may be revoked; make one with `forebay keys create`"


class ApiKeys:
    """Callers by their keys. A key that was revoked is taken for as long as `Keeping` says."""

    def __init__(self, mesh: Mesh, keeping: Keeping | None = None, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self._mesh = mesh
        self._clock = clock
        self._owners = Answers(self._ask, keeping or Keeping(), mesh.clock)

    async def caller(self, key: str) -> Caller:
        """Whom a key names. Raises UNAUTHENTICATED; UNAVAILABLE while no scheduler answers and the key isn't known."""
        if not api_key.is_key(key):
            raise refused("it is not a whole API key: copy it again")
        owner = await self._owners.get(api_key.key_hash(key))
        if owner.expires_at and owner.expires_at <= self._clock():
            raise refused("it is an API key that has expired: make a new one with `forebay keys create`")
        roles = ROLES.intersection(owner.roles)
        return Caller(owner.org, owner.key_id, roles, owner.expires_at or float("inf"), key_id=owner.key_id)

    async def _ask(self, key_hash: bytes) -> scheduler_pb2.AuthenticateResponse:
        request = scheduler_pb2.AuthenticateRequest(key_hash=key_hash)
        try:
            return await self._mesh.ask(lambda scheduler: scheduler.stub.Authenticate(request, timeout=_ASK_SECONDS))
        except StatusError as error:
            raise (refused(_NOBODYS) if error.code is Code.UNAUTHENTICATED else error) from None
