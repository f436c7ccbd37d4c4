"""The gRPC face: the server, and InferenceService. Messages in, messages out; the work is done behind it."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.common import rpc
from services.common.errors import Code, StatusError, invalid
from services.gateway import strict_json
from services.gateway.admin import AdminService
from services.gateway.batch_methods import BatchMethods
from services.gateway.conversation import ChatOptions
from services.gateway.embed_call import numbers
from services.gateway.embed_request import admit_embedding
from services.gateway.embeddings import EmbeddingEvent, Embeddings
from services.gateway.gateway import Gateway
from services.gateway.generation import Event, Generations
from services.gateway.idempotency import HEADER, claimed, one_key
from services.gateway.interceptor import Edge, caller, received_at
from services.gateway.models import Capability, ServedModel
from services.gateway.request import Envelope, admit_chat, admit_completion, count_chat_tokens, count_tokens

SERVICE_NAMES = [
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
]

Context = grpc.aio.ServicerContext[Any, Any]
Response = TypeVar("Response", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)


def make_server(gateway: Gateway, max_connections: int | None = None, *, share_port: bool = False) -> tuple[grpc.aio.Server, Any]:
    """The server with its services, not yet bound, and its health servicer."""
    server = rpc.server([Edge(gateway)], max_connections=max_connections, edge=True, share_port=share_port)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(gateway), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(gateway), server)
    return server, rpc.add_standard_services(server, SERVICE_NAMES)


class InferenceService(BatchMethods):
    """Generation, counting and models.

    Streams are written with `context.write` and not as generators: a cancelled call then always raises in here, and never
    leaves a generator behind that nobody resumes.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._gateway = gateway
        self._generations = Generations(gateway.mesh, gateway.metrics, "grpc")
        self._embeddings = Embeddings(gateway.mesh, gateway.metrics, "grpc")
        self._patience = gateway.slow_reader_seconds

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        """See inference.proto."""
        envelope = await self._envelope(request, context, echo=request.echo)
        if request.WhichOneof("prompt") is None:
            raise invalid("prompt", "the request has no prompt: set text or tokens")
        prompt: object = request.text if request.HasField("text") else list(request.tokens.ids)
        admitted = await admit_completion(envelope, prompt, sampling_fields(request.sampling))
        (generation,) = await claimed(self._gateway.mesh, caller(), envelope.idempotency_key, admitted)
        await self._stream(self._generations.run(generation), context, inference_pb2.GenerateResponse)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        """See inference.proto."""
        envelope = await self._envelope(request, context)
        generation = await admit_chat(envelope, _messages(request.messages), sampling_fields(request.sampling), _options(request))
        (generation,) = await claimed(self._gateway.mesh, caller(), envelope.idempotency_key, [generation])
        await self._stream(self._generations.run(generation), context, inference_pb2.ChatResponse)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        """See inference.proto."""
        envelope = await self._envelope(request, context, capability="embed")
        inputs = [entry.text if entry.HasField("text") else list(entry.tokens.ids) for entry in request.inputs]
        embedding = await admit_embedding(envelope, inputs, request.dimensions if request.HasField("dimensions") else None)
        (embedding,) = await claimed(self._gateway.mesh, caller(), envelope.idempotency_key, [embedding])
        async with aclosing(self._embeddings.run(embedding)) as events:
            async for event in events:
                for response in _embed_responses(event):
                    await self._write(context, response)

    async def CountTokens(self, request: inference_pb2.CountTokensRequest, _: Context) -> inference_pb2.CountTokensResponse:
        """See inference.proto."""
        model = self._gateway.catalogue.resolve(request.model, await self._policy())
        match request.WhichOneof("input"):
            case "text":
                ids = await count_tokens(model, request.text)
            case "conversation":
                chat = request.conversation
                grammar = _grammar(chat.grammar) if chat.HasField("grammar") else None
                ids = await count_chat_tokens(model, _messages(chat.messages), _options(chat), grammar)
            case _:
                raise invalid("input", "there is nothing to count: set text or conversation")
        return inference_pb2.CountTokensResponse(num_tokens=len(ids), token_ids=ids, max_model_len=model.max_model_len)

    async def ListModels(self, _: inference_pb2.ListModelsRequest, __: Context) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        offered = self._gateway.catalogue.list(await self._policy())
        return inference_pb2.ListModelsResponse(models=[_model(model) for model in offered])

    async def GetModel(self, request: inference_pb2.GetModelRequest, _: Context) -> inference_pb2.GetModelResponse:
        """See inference.proto."""
        return inference_pb2.GetModelResponse(model=_model(self._gateway.catalogue.describe(request.name, await self._policy())))

    async def _policy(self) -> types_pb2.OrgPolicy:
        return await self._gateway.orgs.policy(caller().org)

    async def _envelope(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest | inference_pb2.EmbedRequest,
        context: Context,
        *,
        echo: bool = False,
        capability: Capability = "generate",
    ) -> Envelope:
        if request.latency_class not in types_pb2.LatencyClass.values():
            raise invalid("latency_class", f"latency_class is {request.latency_class}: use REALTIME (1), STANDARD (2) or BATCH (3)")
        key = one_key([str(value) for name, value in context.invocation_metadata() or () if name == HEADER])
        policy = await self._policy()
        return Envelope(
            caller=caller(),
            model=self._gateway.catalogue.resolve(request.model, policy, key or request.label or uuid.uuid4().hex, capability=capability),
            policy=policy,
            latency_class=request.latency_class,
            deadline_seconds=_deadline(context),
            deadlines=self._gateway.deadlines,
            label=request.label or None,
            idempotency_key=key,
            echo=echo,
            max_tokens_cap=self._gateway.max_tokens_cap,
            received_at=received_at(),
            check_queue=self._gateway.mesh.full_queues.check,
        )

    async def _stream(self, events: AsyncGenerator[Event], context: Context, response: type[Response]) -> None:
        async with aclosing(events):
            async for event in events:
                await self._write(context, _wrapped(event, response))

    async def _write(self, context: Context, response: Any) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await context.write(response)
        except TimeoutError:
            raise StatusError(Code.CANCELLED, f"nothing was read for {self._patience:g} s", reason="SLOW_READER") from None
        except grpc.aio.InternalError:  # how a write ends that the client's cancellation meets
            raise asyncio.CancelledError from None


def sampling_fields(sampling: types_pb2.SamplingParams) -> Mapping[str, object]:
    """The fields that are present, as the validator takes them."""
    fields: dict[str, object] = {}
    for descriptor, value in sampling.ListFields():
        if descriptor.name == "logit_bias":
            fields["logit_bias"] = dict(value)
        elif descriptor.name == "grammar":
            fields["grammar"] = _grammar(value)
        elif descriptor.name in ("stop", "stop_token_ids"):
            fields[descriptor.name] = list(value)
        else:
            fields[descriptor.name] = value
    return fields


def _grammar(grammar: types_pb2.Grammar) -> Mapping[str, object]:
    kind = grammar.WhichOneof("kind")
    if kind is None:
        return {}
    return {kind: list(grammar.choice.choices) if kind == "choice" else getattr(grammar, kind)}


def _deadline(context: Context) -> float | None:
    """Seconds left of the call, None where the client set no deadline."""
    seconds = context.time_remaining()
    if seconds is not None and seconds <= 0:
        raise StatusError(Code.DEADLINE_EXCEEDED, "the deadline had passed when the request came: allow more time")
    return seconds


def _messages(messages: Sequence[inference_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """As OpenAI has them."""
    return [
        {
            "role": message.role,
            "content": message.content,
            "tool_calls": [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls],
            "name": message.name or None,
            "tool_call_id": message.tool_call_id or None,
            "reasoning_content": message.reasoning or None,
        }
        for message in messages
    ]


_TOOL_MODES = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: None,
    inference_pb2.TOOL_MODE_NONE: "none",
    inference_pb2.TOOL_MODE_AUTO: "auto",
    inference_pb2.TOOL_MODE_REQUIRED: "required",
}


def _options(request: inference_pb2.ChatRequest | inference_pb2.Conversation) -> ChatOptions:
    """As OpenAI has them."""
    if request.tool_mode not in _TOOL_MODES:
        raise invalid("tool_mode", f"tool_mode is {request.tool_mode}: use NONE (1), AUTO (2) or REQUIRED (3)")
    choice: object = _TOOL_MODES[request.tool_mode]
    if request.tool_name:
        if choice is not None:
            raise invalid("tool_name", "tool_name says what is called: leave tool_mode unspecified")
        choice = {"type": "function", "function": {"name": request.tool_name}}
    parallel = None
    if isinstance(request, inference_pb2.ChatRequest) and request.HasField("parallel_tool_calls"):
        parallel = request.parallel_tool_calls
    return ChatOptions(
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        enable_thinking=request.enable_thinking if request.HasField("enable_thinking") else None,
    )


def _tool(name: str, tool: inference_pb2.Tool) -> dict[str, Any]:
    try:
        parameters = strict_json.loads(tool.parameters) if tool.parameters else None
    except ValueError as error:
        raise invalid(f"{name}.parameters", f"{name}.parameters {error}") from None
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": parameters}}


def _wrapped(event: Event, response: type[Response]) -> Response:
    if isinstance(event, inference_pb2.Started):
        return response(started=event)
    if isinstance(event, inference_pb2.Delta):
        return response(delta=event)
    return response(finished=event)


def _embed_responses(event: EmbeddingEvent) -> Iterator[inference_pb2.EmbedResponse]:
    if isinstance(event, inference_pb2.Started):
        yield inference_pb2.EmbedResponse(started=event)
    elif isinstance(event, inference_pb2.Finished):
        yield inference_pb2.EmbedResponse(finished=event)
    else:  # as the worker's messages, which are far below the largest
        embeddings = [inference_pb2.Embedding(index=index, values=numbers(values)) for index, values in event]
        yield inference_pb2.EmbedResponse(embeddings=inference_pb2.Embeddings(embeddings=embeddings))


def _model(model: ServedModel) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=model.name,
        aliases=model.aliases,
        version=model.version,
        level=model.level,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        capabilities=[model.capability],
        dimensions=model.dimensions,
        ready=model.ready,
        created_unix_seconds=model.created,
    )
