"""Streams over the gateways, held to what an undisturbed worker would have said; and how long each was silent."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.chaos.fleet import Fleet
from bench.chaos.runner import KILLS, continuation
from bench.chaos.worker import MODEL
from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.common.errors import from_rpc

_numbers = itertools.count(1)
RETRIES = 2
"""As OpenAI's SDK: what was refused with a time at which to come back comes back so often."""


@dataclass
class Stream:
    """One request and what became of it. `error`: the code's name, '' where it ended well or hasn't ended."""

    prompt: Sequence[int]
    num_tokens: int
    seed: int = 0
    n: int = 1
    latency_class: int = 2
    deadline: float = 60.0
    gateway: int = 0
    key: str = ""  # idempotency key
    retries: int = 0  # that are left
    num_refused: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)
    started: bool = False
    ended: bool = False
    error: str = ""
    reason: str = ""
    words: str = ""
    num_doubled: int = 0
    num_ends: int = 0
    longest_gap: float = 0.0
    sent_at: float = 0.0
    ended_at: float = 0.0
    request_id: str = ""
    usage: types_pb2.Usage | None = None

    @property
    def num_received(self) -> int:
        """Tokens, over all choices."""
        return sum(map(len, self.ids.values()))

    @property
    def seconds(self) -> float:
        """From its sending to its end."""
        return self.ended_at - self.sent_at

    @property
    def succeeded(self) -> bool:
        """Whether it ended well."""
        return self.ended and not self.error

    @property
    def lost(self) -> bool:
        """No end of any kind."""
        return not self.ended

    @property
    def wrong(self) -> bool:
        """Tokens other than an undisturbed worker's; or a success that lacks some."""
        for index in range(self.n):
            ids = self.ids.get(index, [])
            expected = continuation(self.prompt, len(ids) if not self.succeeded else self.num_tokens, self.seed, index)
            if ids != expected:
                return True
        return False

    def take(self, delta: inference_pb2.Delta) -> None:
        """New tokens. A position that was there already, or one that skips some, shows as doubled or wrong."""
        ids = self.ids.setdefault(delta.choice_index, [])
        if delta.token_ids:
            self.num_doubled += max(0, len(ids) - delta.first_position)
            ids += [-1] * max(0, delta.first_position - len(ids))
        ids += delta.token_ids


class Traffic:
    """Runs streams on a fleet. Channels are kept."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()

    def stub(self, gateway: int) -> Any:
        """Of a gateway, over a channel of its own that comes back soon after it."""
        if gateway not in self._channels:
            options = [
                ("grpc.max_reconnect_backoff_ms", 200),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
            ]
            self._channels[gateway] = grpc.aio.insecure_channel(self._fleet.grpc_address(gateway), options=options)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channels[gateway])
        return stub

    async def run(self, stream: Stream, metadata: Sequence[tuple[str, str]] = ()) -> Stream:
        """To its end, whatever that is. Cancel it to leave it: then it isn't ended."""
        sampling = types_pb2.SamplingParams(
            max_tokens=stream.num_tokens, ignore_eos=True, seed=stream.seed, n=stream.n, temperature=1.0 if stream.seed else 0.0
        )
        request = inference_pb2.GenerateRequest(
            model=MODEL, tokens=types_pb2.TokenIds(ids=stream.prompt), sampling=sampling,
            latency_class=types_pb2.LatencyClass.ValueType(stream.latency_class),
        )  # fmt: skip
        stream.sent_at = time.monotonic()
        metadata = (*self._fleet.metadata, *metadata, *((("idempotency-key", stream.key),) if stream.key else ()))
        while (retry_after := await self._try(stream, request, metadata)) is not None:
            stream.retries -= 1
            stream.num_refused += 1
            await asyncio.sleep(retry_after)
        stream.ended = True
        return stream

    async def _try(self, stream: Stream, request: inference_pb2.GenerateRequest, metadata: Sequence[tuple[str, str]]) -> float | None:
        """One call. Seconds after which to make another one, where it was refused before its first token."""
        last = time.monotonic()
        call = self.stub(stream.gateway).Generate(request, metadata=metadata, timeout=stream.deadline)
        try:
            async for event in call:
                now = time.monotonic()
                if event.HasField("started"):
                    stream.started, stream.request_id = True, event.started.request_id
                    continue
                stream.longest_gap, last = max(stream.longest_gap, now - last), now
                if event.HasField("delta"):
                    stream.take(event.delta)
                else:
                    stream.num_ends += 1
                    stream.usage = event.finished.usage
        except grpc.aio.AioRpcError as failure:
            error = from_rpc(failure)
            if stream.retries and not stream.num_received and error.retry_after_seconds is not None:
                return error.retry_after_seconds
            stream.error, stream.reason, stream.words = error.code.name, error.reason, error.message
            stream.num_ends += 1
        finally:
            call.cancel()
        stream.ended_at = time.monotonic()
        stream.longest_gap = max(stream.longest_gap, stream.ended_at - last)
        return None


def prompt(length: int = 12) -> list[int]:
    """One that no other is, and that asks for no fault."""
    number = next(_numbers)
    unique = [1 + number // 200 % 200, 1 + number % 200, 1 + number // 40_000]
    return (unique + [1 + (number * 7 + i * 13) % (KILLS - 1) for i in range(length)])[: max(3, length)]


def streams(count: int, num_tokens: int, *, gateways: int = 2, length: int = 12, **fields: Any) -> list[Stream]:
    """As many, greedy and seeded in turn, spread over gateways."""
    return [
        Stream(prompt(length), num_tokens, seed=index + 1 if index % 2 else 0, gateway=index % gateways, **fields) for index in range(count)
    ]


class Flow:
    """Streams that run together; the row acts meanwhile."""

    def __init__(self, traffic: Traffic, planned: Sequence[Stream]) -> None:
        self.streams = list(planned)
        self.tasks = [asyncio.create_task(traffic.run(stream)) for stream in planned]

    async def until(self, condition: Callable[[Stream], bool], share: float = 1.0, seconds: float = 30.0) -> None:
        """Waits until so many of them are so, or have ended."""
        until = time.monotonic() + seconds
        while sum(condition(stream) or stream.ended for stream in self.streams) < share * len(self.streams):
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.005)

    async def end(self, seconds: float = 70.0) -> list[Stream]:
        """All of them, at their ends; those that have none by then are left."""
        _, late = await asyncio.wait(self.tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.streams
