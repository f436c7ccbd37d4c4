"""What an org has used, for whoever may know it: users for their own org, operators for any. Keeps nothing itself."""

from forebay.v1 import admin_pb2
from services.common.errors import Code, StatusError
from services.gateway.auth import Caller
from services.gateway.mesh import Mesh

_SECONDS = 5.0


async def usage(mesh: Mesh, who: Caller, request: admin_pb2.GetUsageRequest) -> admin_pb2.GetUsageResponse:
    """One page of rows. A user who names no org gets the own one's; PERMISSION_DENIED for another's."""
    asked = admin_pb2.GetUsageRequest(org=request.org, days=request.days, page_size=request.page_size, page_token=request.page_token)
    if "operator" not in who.roles:
        if request.org not in ("", who.org):
            raise StatusError(Code.PERMISSION_DENIED, "use of another org is for operators: leave org out for your own")
        asked.org = who.org
    return await mesh.ask(lambda scheduler: scheduler.admin.GetUsage(asked, timeout=_SECONDS))
