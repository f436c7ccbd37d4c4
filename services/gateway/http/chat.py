"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import invalid
from services.gateway.conversation import ChatOptions
from services.gateway.field import shown
from services.gateway.http import sse
from services.gateway.http.answer import REASONS, TIERS, Answer, Choice, Numbered, usage_object
from services.gateway.http.fields import SAMPLING, flag
from services.gateway.http.logprobs import chat_content
from services.gateway.http.structured import grammar_of
from services.gateway.request import Generation


def sampling_fields(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The validator's fields of a chat request, and what the client called those that have another name here."""
    grammar, names = grammar_of(body)
    sampling = {name: body[name] for name in SAMPLING if name in body} | grammar
    limit = body.get("max_completion_tokens")
    if limit is not None:
        if body.get("max_tokens") is not None and body["max_tokens"] != limit:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        sampling["max_tokens"] = limit
        names["max_tokens"] = "max_completion_tokens"
    wanted, top = flag(body, "logprobs"), body.get("top_logprobs")
    if top is not None and not wanted:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    if wanted:
        sampling["logprobs"] = 0 if top is None else top
        names["logprobs"] = "top_logprobs"
    return sampling, names


def options(body: Mapping[str, Any]) -> ChatOptions:
    """Tools and thinking. vLLM's chat_template_kwargs may hold enable_thinking, and nothing else."""
    name = "chat_template_kwargs"
    kwargs, thinking = body.get(name), body.get("enable_thinking")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise invalid(name, f"{name} is {shown(kwargs)}: it must be an object")
    for key in kwargs or ():
        if key != "enable_thinking":
            raise invalid(f"{name}.{key[:64]}", f"{name}.{key[:64]!a} is not offered: enable_thinking is")
    if kwargs and kwargs["enable_thinking"] is not None:
        if thinking not in (None, kwargs["enable_thinking"]):
            raise invalid("enable_thinking", f"enable_thinking contradicts {name}: send one of them")
        thinking = kwargs["enable_thinking"]
    return ChatOptions(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls"), thinking)


def whole(generation: Generation, answer: Answer) -> dict[str, Any]:
    """The chat.completion object."""
    choices = [
        {
            "index": index,
            "message": _message(choice),
            "logprobs": {"content": chat_content(choice.logprobs), "refusal": None} if generation.sampling.logprobs is not None else None,
            "finish_reason": REASONS[choice.reason],
        }
        for index, choice in enumerate(answer.choices)
    ]
    return {
        **_head(generation, "chat.completion", answer.started),
        "choices": choices,
        "usage": usage_object(answer.usage),
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text.strip() or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in choice.tool_calls
        ]
    return message


async def chunks(events: AsyncGenerator[Numbered], generation: Generation, *, include_usage: bool) -> AsyncGenerator[bytes]:
    """Role chunks, text chunks, one finish_reason per choice, usage if wanted, [DONE]."""
    head: dict[str, Any] = {}
    with_logprobs = generation.sampling.logprobs is not None

    def chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None) -> bytes:
        return sse.event({**head, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]})

    async with aclosing(events):
        async for _, event in events:
            if isinstance(event, inference_pb2.Started):
                head = _head(generation, "chat.completion.chunk", event)
                if include_usage:
                    head["usage"] = None
                for index in range(generation.sampling.n):
                    yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
            elif isinstance(event, inference_pb2.Delta):
                logprobs = {"content": chat_content(event.logprobs), "refusal": None} if with_logprobs else None
                deltas = _deltas(event)
                if logprobs and event.logprobs:
                    deltas[:1] = [deltas[0] if deltas else {"content": ""}]
                for number, delta in enumerate(deltas):
                    yield chunk(event.choice_index, delta, logprobs if number == 0 else None)
            else:
                for index, reason in enumerate(event.reasons):
                    yield chunk(index, {}, reason=REASONS[reason])
                if include_usage:
                    yield sse.event({**head, "choices": [], "usage": usage_object(event.usage)})
    yield sse.DONE


def _deltas(event: inference_pb2.Delta) -> list[dict[str, Any]]:
    """In the order in which they were said: thoughts, then text, then calls."""
    deltas: list[dict[str, Any]] = []
    if event.reasoning:
        deltas.append({"reasoning_content": event.reasoning})
    if event.text:
        deltas.append({"content": event.text})
    return deltas + [{"tool_calls": [_call_piece(piece)]} for piece in event.tool_calls]


def _call_piece(piece: inference_pb2.ToolCallDelta) -> dict[str, Any]:
    if piece.name:
        return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def _head(generation: Generation, kind: str, started: inference_pb2.Started) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{generation.request_id}",
        "object": kind,
        "created": int(generation.created),
        "model": generation.model.name,
        "service_tier": TIERS.get(started.latency_class, TIERS[types_pb2.LATENCY_CLASS_STANDARD]),
        "system_fingerprint": started.system_fingerprint,
    }
