"""AdminService: what operators see and set, passed on to a scheduler under the name of the token's owner. Keeps nothing itself."""

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from forebay.v1 import admin_pb2, admin_pb2_grpc
from services.gateway.gateway import Gateway
from services.gateway.interceptor import caller
from services.gateway.mesh import Scheduler
from services.gateway.refusals import Refusals
from services.gateway.usage import usage

_SECONDS = 5.0
Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer", bound=Message)


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """For operators alone, but for GetUsage and Explain of one's own org. Whatever `actor` a client writes is overwritten."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._refusals = Refusals(gateway.mesh)

    async def GetFleet(self, _: admin_pb2.GetFleetRequest, __: Context) -> admin_pb2.GetFleetResponse:
        """See admin.proto."""
        self._refusals.require_operator(caller(), "GetFleet")
        return await self._gateway.fleet.see()

    async def Drain(self, request: admin_pb2.DrainRequest, _: Context) -> admin_pb2.DrainResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.Drain)

    async def SetModel(self, request: admin_pb2.SetModelRequest, _: Context) -> admin_pb2.SetModelResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.SetModel)

    async def ListOrgs(self, request: admin_pb2.ListOrgsRequest, _: Context) -> admin_pb2.ListOrgsResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.ListOrgs)

    async def SetOrg(self, request: admin_pb2.SetOrgRequest, _: Context) -> admin_pb2.SetOrgResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.SetOrg)

    async def ResetOrg(self, request: admin_pb2.ResetOrgRequest, _: Context) -> admin_pb2.ResetOrgResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.ResetOrg)

    async def CreateKey(self, request: admin_pb2.CreateKeyRequest, _: Context) -> admin_pb2.CreateKeyResponse:
        """See admin.proto. One scheduler is asked and no other after it: it may have made a key before it was lost."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.CreateKey, once=True)

    async def ListKeys(self, request: admin_pb2.ListKeysRequest, _: Context) -> admin_pb2.ListKeysResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.ListKeys)

    async def RevokeKey(self, request: admin_pb2.RevokeKeyRequest, _: Context) -> admin_pb2.RevokeKeyResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.RevokeKey)

    async def GetUsage(self, request: admin_pb2.GetUsageRequest, _: Context) -> admin_pb2.GetUsageResponse:
        """See admin.proto."""
        return await usage(self._gateway.mesh, caller(), request)

    async def ListAudit(self, request: admin_pb2.ListAuditRequest, _: Context) -> admin_pb2.ListAuditResponse:
        """See admin.proto."""
        return await self._pass_on(request, lambda scheduler: scheduler.admin.ListAudit)

    async def Explain(self, request: admin_pb2.ExplainRequest, _: Context) -> admin_pb2.ExplainResponse:
        """See admin.proto. A user sees the own org's requests; others' are as unknown as those that never were."""
        who = caller()
        asked = admin_pb2.ExplainRequest(request_id=request.request_id, org=request.org if "operator" in who.roles else who.org)
        return await self._gateway.mesh.ask(lambda scheduler: scheduler.admin.Explain(asked, timeout=_SECONDS))

    async def _pass_on(
        self, request: Message, method: Callable[[Scheduler], Callable[..., grpc.aio.UnaryUnaryCall[Any, Answer]]], *, once: bool = False
    ) -> Answer:
        who = caller()
        self._refusals.require_operator(who, request.DESCRIPTOR.name.removesuffix("Request"))
        if "actor" in request.DESCRIPTOR.fields_by_name:
            request.actor = who.actor  # type: ignore[attr-defined]  # it has one
        return await self._gateway.mesh.ask(lambda scheduler: method(scheduler)(request, timeout=_SECONDS), once=once)
