"""What both generating endpoints share: several generations as one stream, its collection into one answer, usage, headers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import StatusError
from services.gateway.generation import Event
from services.gateway.request import Generation

TIERS = {
    types_pb2.LATENCY_CLASS_REALTIME: "priority",
    types_pb2.LATENCY_CLASS_STANDARD: "default",
    types_pb2.LATENCY_CLASS_BATCH: "flex",
}
REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_MAX_WAITING_EVENTS = 64  # of one answer, between its generations and its reader

Run = Callable[[Generation], AsyncGenerator[Event]]
Reserve = Callable[[Sequence[Generation]], Awaitable[None]]
Numbered = tuple[int, Event]
"""An event and the number of the generation (prompt) it belongs to."""


async def merged(run: Run, generations: Sequence[Generation], reserve: Reserve | None = None) -> AsyncGenerator[Numbered]:
    """The events of all generations as they come, once they have their quota together. The first failure ends them all."""
    if len(generations) == 1:
        async with aclosing(run(generations[0])) as events:
            async for event in events:
                yield 0, event
        return
    if reserve is not None:
        await reserve(generations)
    queue: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(_MAX_WAITING_EVENTS)

    async def pump(number: int) -> None:
        try:
            async with aclosing(run(generations[number])) as events:
                async for event in events:
                    await queue.put((number, event))
            await queue.put(None)
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)

    pumps = [asyncio.create_task(pump(number)) for number in range(len(generations))]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                generations[0].siblings.failure = item if isinstance(item, StatusError) else None
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass
class Choice:
    """One choice, whole."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[inference_pb2.ToolCallDelta] = field(default_factory=list)  # one each, whole
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
    logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)


@dataclass
class Answer:
    """Everything that the generations of one request came to."""

    started: inference_pb2.Started
    choices: list[Choice]
    usage: types_pb2.Usage


async def collected(events: AsyncGenerator[Numbered], generations: Sequence[Generation]) -> Answer:
    """Reads to the end. Choices are numbered through over the prompts; prompt log-probabilities stand before the output's."""
    sizes = [generation.sampling.n for generation in generations]
    choices = [Choice() for _ in range(sum(sizes))]
    texts: list[list[str]] = [[] for _ in choices]
    thoughts: list[list[str]] = [[] for _ in choices]
    usages: list[types_pb2.Usage] = []
    started: inference_pb2.Started | None = None
    async with aclosing(events):
        async for number, event in events:
            first = sum(sizes[:number])
            if isinstance(event, inference_pb2.Started):
                started = started or event
            elif isinstance(event, inference_pb2.Delta):
                for index in range(first, first + sizes[number]) if event.prompt_logprobs else ():
                    choices[index].logprobs.extend(event.prompt_logprobs)
                texts[first + event.choice_index].append(event.text)
                thoughts[first + event.choice_index].append(event.reasoning)
                choices[first + event.choice_index].logprobs.extend(event.logprobs)
                _add_calls(choices[first + event.choice_index], event.tool_calls)
            else:
                usages.append(event.usage)
                for index, reason in enumerate(event.reasons):
                    choices[first + index].reason = reason
    assert started is not None, "a generation ended without having started"
    for choice, pieces, thought in zip(choices, texts, thoughts, strict=True):
        choice.text, choice.reasoning = "".join(pieces), "".join(thought)
    return Answer(started, choices, total(usages))


def _add_calls(choice: Choice, pieces: Iterable[inference_pb2.ToolCallDelta]) -> None:
    for piece in pieces:
        if piece.name:
            choice.tool_calls.append(piece)
        else:
            choice.tool_calls[piece.index].arguments += piece.arguments


def total(usages: Sequence[types_pb2.Usage]) -> types_pb2.Usage:
    """The sum."""
    return types_pb2.Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        preemptions=sum(usage.preemptions for usage in usages),
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
    )


def usage_object(usage: types_pb2.Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
        },
    }
