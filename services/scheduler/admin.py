"""AdminService: the fleet, orgs, API keys, usage, audit, ended requests. The gateway has checked who asks; acts are written down here."""

import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from forebay.v1 import admin_pb2, admin_pb2_grpc, explain_pb2, scheduler_pb2, types_pb2
from services.common import errors
from services.common.errors import StatusError, invalid
from services.policy.org import ANY_ORG
from services.scheduler import keys
from services.scheduler.api_keys import KeyInfo
from services.scheduler.audit import Act
from services.scheduler.model_acts import Outcome
from services.scheduler.orgs import MAX_OVERRIDDEN
from services.scheduler.scheduler import Scheduler
from services.scheduler.usage import MAX_DAYS, MAX_ROWS, read_token, write_token
from services.scheduler.wire import MAX_ID_LENGTH, check_id, check_new_org, key_to_proto, org_to_proto, usage_to_proto

MAX_LISTED_ACTS = 1000
_LISTED_ACTS = 100

_MODEL_ACTS: dict[int, str] = {
    scheduler_pb2.MODEL_ACT_KIND_LOAD: "LoadModel",
    scheduler_pb2.MODEL_ACT_KIND_UNLOAD: "UnloadModel",
    scheduler_pb2.MODEL_ACT_KIND_PIN: "PinModel",
    scheduler_pb2.MODEL_ACT_KIND_UNPIN: "UnpinModel",
}

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """See admin.proto. GetFleet and ListOrgs come from memory: they answer while Redis is away."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def GetFleet(self, request: admin_pb2.GetFleetRequest, context: Context) -> admin_pb2.GetFleetResponse:  # noqa: ARG002
        """See admin.proto."""
        queues = [
            admin_pb2.QueueDepth(
                model=model, latency_class=types_pb2.LatencyClass.ValueType(latency_class), num_waiting=num, oldest_seconds=oldest
            )
            for (model, latency_class), (num, oldest) in sorted(self._scheduler.keeper.lines().items())
        ]
        workers = self._scheduler.registry.states(time.monotonic())
        return admin_pb2.GetFleetResponse(
            workers=workers,
            queues=queues,
            scheduler_id=self._scheduler.options.scheduler_id,
            policies=self._scheduler.orgs.digest,
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """See admin.proto."""
        act = Act(request.actor, "Undrain" if request.undrain else "Drain", request.name)
        workers = await self._answer(act, self._drain(act, drained=not request.undrain), context)
        return admin_pb2.DrainResponse(worker_ids=workers)

    async def _drain(self, act: Act, *, drained: bool) -> list[str]:
        check_id("name", act.target)
        scheduler = self._scheduler
        return await scheduler.drains.set(scheduler.audit, act, drained=drained, registry=scheduler.registry, now=time.monotonic())

    async def SetModel(self, request: admin_pb2.SetModelRequest, context: Context) -> admin_pb2.SetModelResponse:
        """See admin.proto."""
        details = json.dumps({"worker": request.worker[:MAX_ID_LENGTH]}) if request.worker else ""
        act = Act(request.actor, _MODEL_ACTS.get(request.act, "SetModel"), request.model, details)
        outcomes = await self._answer(act, self._set_model(act, request), context)
        return admin_pb2.SetModelResponse(
            outcomes=[admin_pb2.WorkerOutcome(worker_id=o.worker_id, refused=o.refused, words=o.words) for o in outcomes]
        )

    async def _set_model(self, act: Act, request: admin_pb2.SetModelRequest) -> list[Outcome]:
        check_id("model", request.model)
        if request.worker:
            check_id("worker", request.worker)
        if request.act not in _MODEL_ACTS:
            raise invalid("act", f"act is {request.act}; it must be LOAD, UNLOAD, PIN or UNPIN")
        return await self._scheduler.model_acts.set(self._scheduler.audit, act, request.act, request.worker, time.monotonic())

    async def ListOrgs(self, request: admin_pb2.ListOrgsRequest, context: Context) -> admin_pb2.ListOrgsResponse:  # noqa: ARG002
        """See admin.proto."""
        orgs = self._scheduler.orgs
        return admin_pb2.ListOrgsResponse(orgs=[org_to_proto(policy) for policy in orgs.all()], overridden=orgs.overridden)

    async def SetOrg(self, request: admin_pb2.SetOrgRequest, context: Context) -> admin_pb2.SetOrgResponse:
        """See admin.proto."""
        org = request.policy.org
        act = Act(request.actor, "SetOrg", org, json.dumps({"fields": [name[:64] for name in request.fields[:32]]}))
        policy = await self._answer(act, self._set_org(act, request), context)
        return admin_pb2.SetOrgResponse(policy=policy)

    async def _set_org(self, act: Act, request: admin_pb2.SetOrgRequest) -> types_pb2.OrgPolicy:
        orgs, org = self._scheduler.orgs, request.policy.org
        if org != ANY_ORG:  # which has a refusal of its own
            check_new_org("policy.org", org)
        await orgs.refresh()  # Or what was set through another scheduler just now would be lost.
        known = orgs.stored(org)
        overrides = orgs.overrides_with(org, request.policy, list(request.fields))
        act = Act(act.actor, act.act, org, overrides)
        await self._scheduler.audit.change(act, keys.ORGS, org, overrides, most=MAX_OVERRIDDEN, known=known)
        await orgs.refresh()
        return org_to_proto(orgs.get(org))

    async def ResetOrg(self, request: admin_pb2.ResetOrgRequest, context: Context) -> admin_pb2.ResetOrgResponse:
        """See admin.proto."""
        act = Act(request.actor, "ResetOrg", request.org)
        policy = await self._answer(act, self._reset_org(act), context)
        return admin_pb2.ResetOrgResponse(policy=policy)

    async def _reset_org(self, act: Act) -> types_pb2.OrgPolicy:
        orgs = self._scheduler.orgs
        check_id("org", act.target)
        await orgs.refresh()
        if act.target in orgs.overridden:
            await self._scheduler.audit.change(act, keys.ORGS, act.target, "", most=MAX_OVERRIDDEN)
            await orgs.refresh()
        return org_to_proto(orgs.get(act.target))

    async def CreateKey(self, request: admin_pb2.CreateKeyRequest, context: Context) -> admin_pb2.CreateKeyResponse:
        """See admin.proto."""
        act = Act(request.actor, "CreateKey", request.org, json.dumps({"name": request.name[:80]}))
        key, info = await self._answer(act, self._create_key(request), context)
        return admin_pb2.CreateKeyResponse(key=key, info=key_to_proto(info))

    async def _create_key(self, request: admin_pb2.CreateKeyRequest) -> tuple[str, KeyInfo]:
        check_new_org("org", request.org)
        return await self._scheduler.api_keys.create(
            request.actor, request.org, request.name, list(request.roles), request.lifetime_seconds
        )

    async def ListKeys(self, request: admin_pb2.ListKeysRequest, context: Context) -> admin_pb2.ListKeysResponse:
        """See admin.proto."""
        infos = await self._answer(None, self._scheduler.api_keys.listed(request.org), context)
        return admin_pb2.ListKeysResponse(keys=[key_to_proto(info) for info in infos])

    async def RevokeKey(self, request: admin_pb2.RevokeKeyRequest, context: Context) -> admin_pb2.RevokeKeyResponse:
        """See admin.proto."""
        act = Act(request.actor, "RevokeKey", request.key_id)
        await self._answer(act, self._scheduler.api_keys.revoke(request.actor, request.key_id), context)
        return admin_pb2.RevokeKeyResponse()

    async def GetUsage(self, request: admin_pb2.GetUsageRequest, context: Context) -> admin_pb2.GetUsageResponse:
        """See admin.proto."""
        return await self._answer(None, self._usage(request), context)

    async def _usage(self, request: admin_pb2.GetUsageRequest) -> admin_pb2.GetUsageResponse:
        if not 0 <= request.days <= MAX_DAYS:
            raise invalid("days", f"days is {request.days}; it must be 0 (today) to {MAX_DAYS}")
        if not 0 <= request.page_size <= MAX_ROWS:
            raise invalid("page_size", f"page_size is {request.page_size}; it must be 1 to {MAX_ROWS}, or 0 for that")
        size = request.page_size or MAX_ROWS
        rows = await self._scheduler.usage.rows(request.org, request.days or 1, size + 1, read_token(request.page_token))
        follows = write_token(rows[size - 1]) if len(rows) > size else ""
        return admin_pb2.GetUsageResponse(rows=map(usage_to_proto, rows[:size]), next_page_token=follows)

    async def ListAudit(self, request: admin_pb2.ListAuditRequest, context: Context) -> admin_pb2.ListAuditResponse:
        """See admin.proto."""
        acts = await self._answer(None, self._acts(request), context)
        entries = [
            admin_pb2.AuditEntry(at=a.at, actor=a.actor, act=a.act, target=a.target, details=a.details, outcome=a.outcome) for a in acts
        ]
        return admin_pb2.ListAuditResponse(entries=entries)

    async def Explain(self, request: admin_pb2.ExplainRequest, context: Context) -> admin_pb2.ExplainResponse:
        """See admin.proto."""
        explanation = await self._answer(None, self._explanation(request), context)
        return admin_pb2.ExplainResponse(explanation=explanation)

    async def _explanation(self, request: admin_pb2.ExplainRequest) -> explain_pb2.Explanation:
        check_id("request_id", request.request_id)
        return await self._scheduler.explanations.get(request.request_id, request.org)

    async def _acts(self, request: admin_pb2.ListAuditRequest) -> list[Act]:
        if not 0 <= request.limit <= MAX_LISTED_ACTS:
            raise invalid("limit", f"limit is {request.limit}; it must be 0 ({_LISTED_ACTS}) to {MAX_LISTED_ACTS}")
        return await self._scheduler.audit.latest(request.limit or _LISTED_ACTS)

    async def _answer(self, act: Act | None, work: Coroutine[Any, Any, Answer], context: Context) -> Answer:
        """What the work gives. An act that can't be done is written down as refused."""
        try:
            if act is not None:
                check_id("actor", act.actor)
            return await work
        except StatusError as error:
            work.close()
            if act is not None:
                await self._scheduler.audit.refused(_bounded(act), error)
            await errors.abort(context, error)


def _bounded(act: Act) -> Act:
    return Act(act.actor[:MAX_ID_LENGTH], act.act, act.target[:MAX_ID_LENGTH], act.details)
