"""POST /v1/completions."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from forebay.v1 import inference_pb2, types_pb2
from services.gateway.http import sse
from services.gateway.http.answer import REASONS, TIERS, Answer, Numbered, total, usage_object
from services.gateway.http.fields import SAMPLING
from services.gateway.http.logprobs import LegacyLogprobs
from services.gateway.http.structured import grammar_of
from services.gateway.request import Generation


def sampling_fields(body: Mapping[str, Any], *, echo: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The validator's fields of a completion request, and what the client called those that have another name here.

    With echo, the prompt's tokens have log-probabilities, too.
    """
    grammar, names = grammar_of(body)
    sampling = {name: body[name] for name in SAMPLING | {"best_of", "logprobs"} if name in body} | grammar
    if echo and sampling.get("logprobs") is not None:
        sampling["prompt_logprobs"] = sampling["logprobs"]
    return sampling, names


def whole(generations: Sequence[Generation], answer: Answer) -> dict[str, Any]:
    """The text_completion object; choices are numbered through over the prompts."""
    with_logprobs = _with_logprobs(generations[0])
    choices = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": LegacyLogprobs().piece(choice.logprobs) if with_logprobs else None,
            "finish_reason": REASONS[choice.reason],
        }
        for index, choice in enumerate(answer.choices)
    ]
    return {**_head(generations[0], answer.started), "choices": choices, "usage": usage_object(answer.usage)}


async def chunks(events: AsyncGenerator[Numbered], generations: Sequence[Generation], *, include_usage: bool) -> AsyncGenerator[bytes]:
    """Text chunks, one finish_reason per choice, usage if wanted, [DONE]."""
    n = generations[0].sampling.n
    logprobs = [LegacyLogprobs() for _ in range(n * len(generations))] if _with_logprobs(generations[0]) else None
    head: dict[str, Any] = {}
    usages: list[types_pb2.Usage] = []

    def chunk(index: int, text: str, entries: Sequence[types_pb2.PositionLogprobs] = (), reason: str | None = None) -> bytes:
        piece = logprobs[index].piece(entries) if logprobs and reason is None else None
        return sse.event({**head, "choices": [{"index": index, "text": text, "logprobs": piece, "finish_reason": reason}]})

    async with aclosing(events):
        async for number, event in events:
            first = number * n
            if isinstance(event, inference_pb2.Started):
                head = head or _head(generations[0], event, usage=include_usage)
            elif isinstance(event, inference_pb2.Delta):
                for index in range(first, first + n) if event.prompt_logprobs else ():
                    yield chunk(index, "", event.prompt_logprobs)
                if event.text or (logprobs and event.logprobs):
                    yield chunk(first + event.choice_index, event.text, event.logprobs)
            else:
                usages.append(event.usage)
                for index, reason in enumerate(event.reasons):
                    yield chunk(first + index, "", reason=REASONS[reason])
    if include_usage:
        yield sse.event({**head, "choices": [], "usage": usage_object(total(usages))})
    yield sse.DONE


def _with_logprobs(generation: Generation) -> bool:
    return generation.sampling.logprobs is not None or generation.sampling.prompt_logprobs is not None


def _head(generation: Generation, started: inference_pb2.Started, *, usage: bool = False) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": f"cmpl-{generation.request_id}",
        "object": "text_completion",
        "created": int(generation.created),
        "model": generation.model.name,
        "service_tier": TIERS.get(started.latency_class, TIERS[types_pb2.LATENCY_CLASS_STANDARD]),
        "system_fingerprint": started.system_fingerprint,
    }
    return {**head, "usage": None} if usage else head
