"""What orgs were promised: policies, asked for at a scheduler and known for some seconds. Decides nothing."""

from forebay.v1 import scheduler_pb2, types_pb2
from services.gateway.answers import Answers, Keeping
from services.gateway.mesh import Mesh

_ASK_SECONDS = 1.0
_KEEPING = Keeping(away_seconds=3600.0, new_per_second=2000.0)  # orgs come from verified tokens alone


class Orgs:
    """Policies by org."""

    def __init__(self, mesh: Mesh, keeping: Keeping = _KEEPING) -> None:
        self._mesh = mesh
        self._digest = ""
        self._policies = Answers(self._ask, keeping, mesh.clock)

    async def policy(self, org: str) -> types_pb2.OrgPolicy:
        """The org's policy, the last good one while no scheduler answers. Raises UNAVAILABLE where there is none."""
        return await self._policies.get(org)

    def know(self, digest: str) -> None:
        """What a scheduler says that all policies come to: another one than before makes those that are kept old."""
        if digest != self._digest:
            self._digest = digest
            self._policies.expire()

    async def _ask(self, org: str) -> types_pb2.OrgPolicy:
        request = scheduler_pb2.GetOrgRequest(org=org)
        answer = await self._mesh.ask(lambda scheduler: scheduler.stub.GetOrg(request, timeout=_ASK_SECONDS))
        return answer.policy
