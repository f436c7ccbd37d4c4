"""A gateway in this process for the commands to talk to: fixed answers by the words of the question."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc

from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, scheduler_pb2, types_pb2
from services.common.errors import abort, invalid


class Gateway(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Answers with fixed words and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[inference_pb2.ChatRequest] = []
        self.tokens: list[Any] = []
        self.cancelled = threading.Event()

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:  # type: ignore[override]
        self.asked.append(request)
        self.tokens.append(dict(context.invocation_metadata())["authorization"])
        if request.messages[-1].content == "refuse":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        if request.model == "none":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no model is called none: see ListModels")
        if request.messages[-1].content == "little room" and request.sampling.max_tokens > 100:
            await abort(context, invalid("max_tokens", f"max_tokens is {request.sampling.max_tokens}: there is room for 100"))
        yield inference_pb2.ChatResponse(started=inference_pb2.Started(request_id="r-1", model="tiny@fp32", seed=9, system_fingerprint="f"))
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

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:  # type: ignore[override]
        model = inference_pb2.Model(name="tiny", aliases=["chat"], level="fp32", max_model_len=2048, version="00ff", ready=True)
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetFleet(self, request: Any, context: Any) -> admin_pb2.GetFleetResponse:  # type: ignore[override]
        registration = scheduler_pb2.Register(worker_id="worker-1", max_sequences=32)
        registration.models.add(model="tiny@fp32", num_blocks=100)
        beat = scheduler_pb2.Heartbeat(healthy=True, num_running=3, num_used_blocks=40, utilization=0.5)
        workers = [admin_pb2.WorkerState(registration=registration, heartbeat=beat, ready=True)]
        registration = scheduler_pb2.Register(worker_id="worker-2", max_sequences=32, models=registration.models)
        workers.append(
            admin_pb2.WorkerState(
                registration=registration, heartbeat=beat, heartbeat_age_seconds=0.5, not_ready_reason="its stream ended 0 s ago"
            )
        )
        queue = admin_pb2.QueueDepth(model="tiny@fp32", latency_class=types_pb2.LATENCY_CLASS_BATCH, num_waiting=4, oldest_seconds=2)
        return admin_pb2.GetFleetResponse(workers=workers, queues=[queue])
