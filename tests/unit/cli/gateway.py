"""A gateway in this process for the commands to talk to: fixed answers by the words of the question."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc

from forebay.v1 import admin_pb2, admin_pb2_grpc, batch_pb2, explain_pb2, inference_pb2, inference_pb2_grpc, scheduler_pb2, types_pb2
from services.common.errors import StatusError, abort, invalid


class Gateway(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Answers with fixed words and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[inference_pb2.ChatRequest] = []
        self.embedded: list[inference_pb2.EmbedRequest] = []
        self.acts: list[Any] = []  # requests of operators
        self.tokens: list[Any] = []
        self.cancelled = threading.Event()
        self.fleet_is_empty = False
        self.is_for_users = False  # nobody is an operator
        self.states: list[scheduler_pb2.ModelState] = []  # of the first worker's models
        self.budget: scheduler_pb2.DeviceBudget | None = None
        self.batches: list[batch_pb2.Batch] = []

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:  # type: ignore[override]
        self.asked.append(request)
        self.tokens.append(dict(context.invocation_metadata())["authorization"])
        if request.messages[-1].content == "refuse":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        if request.model == "none":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no model is called none: see ListModels")
        if request.messages[-1].content == "little room" and request.sampling.max_tokens > 100:
            await abort(context, invalid("max_tokens", f"max_tokens is {request.sampling.max_tokens}: there is room for 100"))
        asked = request.latency_class or types_pb2.LATENCY_CLASS_STANDARD
        lowered = asked if asked == types_pb2.LATENCY_CLASS_REALTIME else None
        started = inference_pb2.Started(request_id="r-1", model="tiny@fp32", seed=9, system_fingerprint="f", lowered_from=lowered)
        started.latency_class = types_pb2.LATENCY_CLASS_STANDARD if lowered else asked
        yield inference_pb2.ChatResponse(started=started)
        if request.messages[-1].content in ("forever", "break"):
            async for response in self._no_whole_answer(request.messages[-1].content, context):
                yield response
        for position, text in enumerate(("Par", "is")):
            yield inference_pb2.ChatResponse(delta=inference_pb2.Delta(text=text, token_ids=[position], first_position=position))
        usage = types_pb2.Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1)
        reason = types_pb2.FINISH_REASON_LENGTH if request.messages[-1].content == "long" else types_pb2.FINISH_REASON_STOP
        yield inference_pb2.ChatResponse(finished=inference_pb2.Finished(reasons=[reason], usage=usage))

    async def _no_whole_answer(self, how: str, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:
        yield inference_pb2.ChatResponse(delta=inference_pb2.Delta(text="Once upon", token_ids=[1]))
        if how == "break":
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> AsyncIterator[inference_pb2.EmbedResponse]:  # type: ignore[override]
        self.embedded.append(request)
        if request.inputs[0].text == "refuse":
            await abort(context, invalid("inputs[0]", "inputs[0] has 300 tokens"))
        yield inference_pb2.EmbedResponse(started=inference_pb2.Started(request_id="r-1", model="vectors@fp32"))
        for index, entry in reversed(list(enumerate(request.inputs))):
            values = [3.0, 4.0, 0.0, 0.0, 0.0] if "a" in entry.text else [0.0, 5.0, 0.0, 0.0, 0.0]
            embedding = inference_pb2.Embedding(index=index, values=values[: request.dimensions or 5])
            yield inference_pb2.EmbedResponse(embeddings=inference_pb2.Embeddings(embeddings=[embedding]))
        yield inference_pb2.EmbedResponse(finished=inference_pb2.Finished())

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:  # type: ignore[override]
        model = inference_pb2.Model(name="tiny", aliases=["chat"], level="fp32", max_model_len=2048, version="00ff", ready=True)
        model.capabilities.append("generate")
        return inference_pb2.ListModelsResponse(models=[model])

    async def SubmitBatch(self, request_iterator: Any, context: Any) -> inference_pb2.SubmitBatchResponse:  # type: ignore[override]
        pieces = [piece async for piece in request_iterator]
        self.acts.append((pieces[0].header, b"".join(piece.lines for piece in pieces[1:])))
        return inference_pb2.SubmitBatchResponse(batch=_batch())

    async def GetBatch(self, request: Any, context: Any) -> inference_pb2.GetBatchResponse:  # type: ignore[override]
        if request.batch_id == "none":
            await abort(context, StatusError(grpc.StatusCode.NOT_FOUND, "there is no batch 'none'"))
        self.acts.append(request)
        return inference_pb2.GetBatchResponse(batch=self.batches.pop(0) if self.batches else _batch())

    async def ListBatches(self, request: Any, context: Any) -> inference_pb2.ListBatchesResponse:  # type: ignore[override]
        return inference_pb2.ListBatchesResponse(batches=self.batches)

    async def CancelBatch(self, request: Any, context: Any) -> inference_pb2.CancelBatchResponse:  # type: ignore[override]
        return inference_pb2.CancelBatchResponse(batch=_batch(batch_pb2.BATCH_STATUS_CANCELLING))

    async def StreamResults(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.StreamResultsResponse]:  # type: ignore[override]
        self.acts.append(request)
        for line in (2, 1):
            result = batch_pb2.BatchResult(line=line, json=f'{{"line": {line}}}')
            yield inference_pb2.StreamResultsResponse(result=result, cursor=3 - line)
        yield inference_pb2.StreamResultsResponse(batch=_batch(), cursor=2)

    async def GetFleet(self, request: Any, context: Any) -> admin_pb2.GetFleetResponse:  # type: ignore[override]
        if self.is_for_users:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "for operators")
        if self.fleet_is_empty:
            return admin_pb2.GetFleetResponse()
        registration = scheduler_pb2.Register(worker_id="worker-1", max_sequences=32)
        registration.models.add(model="tiny@fp32", num_blocks=100)
        registration.models.add(model="vectors@fp32", num_blocks=1 << 20, max_call_tokens=1 << 19)
        beat = scheduler_pb2.Heartbeat(healthy=True, num_running=3, num_used_blocks=40, utilization=0.5, temperature_celsius=61)
        workers = [admin_pb2.WorkerState(registration=registration, heartbeat=beat, ready=True)]
        told = workers[0].heartbeat
        told.models.extend(self.states)
        if self.budget is not None:
            told.budget.CopyFrom(self.budget)
        registration = scheduler_pb2.Register(worker_id="worker-2", max_sequences=32, models=registration.models)
        workers.append(
            admin_pb2.WorkerState(
                registration=registration, heartbeat=beat, heartbeat_age_seconds=0.5, not_ready_reason="its stream ended 0 s ago"
            )
        )
        queue = admin_pb2.QueueDepth(model="tiny@fp32", latency_class=types_pb2.LATENCY_CLASS_BATCH, num_waiting=4, oldest_seconds=2)
        return admin_pb2.GetFleetResponse(workers=workers, queues=[queue])

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:  # type: ignore[override]
        self.acts.append(request)
        return admin_pb2.DrainResponse(worker_ids=[] if request.undrain else ["worker-1", "worker-2"])

    async def SetModel(self, request: Any, context: Any) -> admin_pb2.SetModelResponse:  # type: ignore[override]
        self.acts.append(request)
        said = [admin_pb2.WorkerOutcome(worker_id="worker-1", words="is coming to the device")]
        if request.worker != "worker-1":
            said.append(admin_pb2.WorkerOutcome(worker_id="worker-2", refused=True, words="is in use by a request"))
        return admin_pb2.SetModelResponse(outcomes=said)

    async def CreateKey(self, request: Any, context: Any) -> admin_pb2.CreateKeyResponse:  # type: ignore[override]
        self.acts.append(request)
        if request.org == "refused":
            await abort(context, invalid("org", "org is refused: it must be another"))
        expires_at = 1_800_000_000 if request.lifetime_seconds else 0
        info = admin_pb2.ApiKey(key_id="k1", org=request.org, name=request.name, roles=request.roles, expires_at=expires_at)
        return admin_pb2.CreateKeyResponse(key="fb_secret", info=info)

    async def ListKeys(self, request: Any, context: Any) -> admin_pb2.ListKeysResponse:  # type: ignore[override]
        self.acts.append(request)
        key = admin_pb2.ApiKey(key_id="k1", org="acme", name="[ci]", roles=["user", "operator"], created_at=1_700_000_000)
        return admin_pb2.ListKeysResponse(keys=[] if request.org == "none" else [key])

    async def RevokeKey(self, request: Any, context: Any) -> admin_pb2.RevokeKeyResponse:  # type: ignore[override]
        self.acts.append(request)
        return admin_pb2.RevokeKeyResponse()

    async def ListOrgs(self, request: Any, context: Any) -> admin_pb2.ListOrgsResponse:  # type: ignore[override]
        own = types_pb2.OrgPolicy(org="acme", tier="gold", tokens_per_minute=60_000, tokens_burst=90_000, models=["chat", "code-*"])
        for org in (own, others := types_pb2.OrgPolicy(org="*")):
            org.default_class, org.ceiling_class, org.kv_share, org.weight = 2, 1, 0.5, 2
        return admin_pb2.ListOrgsResponse(orgs=[others, own], overridden=["acme"])

    async def SetOrg(self, request: Any, context: Any) -> admin_pb2.SetOrgResponse:  # type: ignore[override]
        self.acts.append(request)
        return admin_pb2.SetOrgResponse(policy=request.policy)

    async def ResetOrg(self, request: Any, context: Any) -> admin_pb2.ResetOrgResponse:  # type: ignore[override]
        self.acts.append(request)
        return admin_pb2.ResetOrgResponse(policy=types_pb2.OrgPolicy(org=request.org))

    async def GetUsage(self, request: Any, context: Any) -> admin_pb2.GetUsageResponse:  # type: ignore[override]
        self.acts.append(request)
        row = admin_pb2.UsageRow(org="acme", day="2026-12-02", model="tiny@fp32", latency_class=types_pb2.LATENCY_CLASS_BATCH)
        row.num_requests, row.num_failed, row.prompt_tokens, row.completion_tokens, row.cached_tokens = 1200, 3, 45_678, 9, 16
        pages = {"endless": {"": "on", "on": "on"}, "paged": {"": "second", "second": "third"}}.get(request.org, {})
        rows = [] if request.org == "none" else [row]
        return admin_pb2.GetUsageResponse(rows=rows, next_page_token=pages.get(request.page_token, ""))

    async def Explain(self, request: Any, context: Any) -> admin_pb2.ExplainResponse:  # type: ignore[override]
        self.acts.append(request)
        if request.request_id == "unknown":
            await abort(context, StatusError(grpc.StatusCode.NOT_FOUND, "there is no record of request 'unknown'"))
        return admin_pb2.ExplainResponse(explanation=_explanation(request.request_id))

    async def ListAudit(self, request: Any, context: Any) -> admin_pb2.ListAuditResponse:  # type: ignore[override]
        self.acts.append(request)
        entry = admin_pb2.AuditEntry(at=1_700_000_000, actor="ops/olga", act="SetOrg", target="acme", details="weight=2", outcome="OK")
        return admin_pb2.ListAuditResponse(entries=[entry])


def _batch(status: batch_pb2.BatchStatus.ValueType = batch_pb2.BATCH_STATUS_IN_PROGRESS) -> batch_pb2.Batch:
    return batch_pb2.Batch(batch_id="batch_1", status=status, endpoint="/v1/completions", num_lines=1200, num_completed=30, num_failed=2)


def _explanation(request_id: str) -> explain_pb2.Explanation:
    """Of a request that was queued for half of its four seconds, and preempted."""
    record = explain_pb2.Explanation(request_id=request_id, org="acme", model="tiny@fp32", latency_class=2, finish_reason=1)
    record.total_seconds, record.ttft_seconds, record.admit_seconds = 4.0, 2.5, 0.5
    record.usage.MergeFrom(types_pb2.Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=5, preemptions=1))
    attempt = record.attempts.add(epoch=1, worker_id="w1", position=3)
    attempt.parts.add(phase=explain_pb2.PHASE_QUEUE, seconds=2.0)
    attempt.parts.add(phase=explain_pb2.PHASE_DECODE, seconds=1.5)
    kinds = explain_pb2.TimelineEventKind
    attempt.timeline.events.add(kind=kinds.TIMELINE_EVENT_KIND_ADMITTED, at_seconds=0.1, num_cached_tokens=16)
    attempt.timeline.events.add(kind=kinds.TIMELINE_EVENT_KIND_PREFILL, at_seconds=0.2, num_tokens=4, num_chunks=2)
    attempt.timeline.events.add(kind=kinds.TIMELINE_EVENT_KIND_PREEMPTED_BY_CLASS, at_seconds=0.3)
    attempt.decision.num_candidates, attempt.decision.waited_for = 2, "room"
    cost = [explain_pb2.CostTerm(name="waiting", value=0), explain_pb2.CostTerm(name="load", value=0.5)]
    attempt.decision.candidates.add(worker_id="w1", chosen=True, cost=cost)
    attempt.decision.candidates.add(worker_id="w2", refused="room")
    return record
