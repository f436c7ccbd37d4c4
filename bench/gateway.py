"""What a delta costs a gateway, a real process: CPU seconds for 128 streams of one token a step, over each face.

A worker that computes nothing has a token for every stream each step, which goes out at once. All processes share the machine, and the
gateway's own CPU time is what counts. A stream that falls behind gets several tokens in one message: `messages` says how many deltas came
alone, `delay` how long after its step a token was with its client.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import orjson

from bench.chaos import tokenizer
from bench.figure import line, show
from bench.gateway_stand_ins import MODEL
from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.cli import keys
from services.common import rpc

TARGET = 15_000
NUM_CHANNELS = 8
WARM_TOKENS = 20
NUM_STREAMS = 128
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stand:
    """The processes that run."""

    stand_ins: "Child"
    gateway: "Child"
    grpc_address: str
    http_address: str
    token: str

    def cpu_seconds(self) -> float:
        """The gateway's so far."""
        fields = Path(f"/proc/{self.gateway.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass
class Count:
    """What clients have had."""

    num_tokens: int = 0
    num_messages: int = 0
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """(position of a message's last token, when it came)"""

    def took(self, num_before: int, num_tokens: int) -> None:
        """A message with so many tokens behind so many others of its stream."""
        if num_tokens:
            self.num_tokens += num_tokens
            self.num_messages += 1
            self.arrivals.append((num_before + num_tokens - 1, time.monotonic()))

    def delay_seconds(self, began: float, step_seconds: float, share: float) -> float:
        """That this share of the messages had come in, after the step of their last token."""
        delays = sorted(at - began - position * step_seconds for position, at in self.arrivals)
        return delays[min(len(delays) - 1, int(len(delays) * share))]


@dataclass(frozen=True)
class Measured:
    """One run."""

    cpu_seconds: float  # the gateway's
    seconds: float
    count: Count
    delay_p50: float
    delay_p99: float


Stream = Callable[[int, int, Count], Awaitable[None]]
"""(number of the stream, tokens to ask for, where to count)"""


class Child:
    """A process that announces what it does."""

    def __init__(self, command: list[str], **environment: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("FOREBAY_", "OTEL_"))}
        self._process = subprocess.Popen([sys.executable, "-m", *command], env=kept | environment, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def until(self, event: str) -> dict[str, Any]:
        """Waits for what it announces. EOFError where it ends instead."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            facts: dict[str, Any] = json.loads(text)
            if facts.get("event") == event:
                return facts
        raise EOFError(f"{self._process.args!r} ended")

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def stand(num_streams: int, step_seconds: float) -> Iterator[Stand]:
    """A gateway and what it talks to."""
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="fb-")))
        stand_ins = Child(["bench.gateway_stand_ins", str(num_streams), str(step_seconds)])
        parts.callback(stand_ins.stop)
        identity = keys.ensure(folder / "keys")
        tokenizer.write(folder / "model")
        gateway = Child(
            ["services.gateway"],
            FOREBAY_SCHEDULERS=stand_ins.until("listening")["address"],
            FOREBAY_MODELS=f"{folder / 'model'}={MODEL}",
            FOREBAY_JWKS_FILE=str(identity.jwks_path),
            FOREBAY_INTERNAL_ADDRESS="127.0.0.1:0",
            FOREBAY_DRAIN_SECONDS="0",
            FOREBAY_LOG_LEVEL="warning",
        )
        parts.callback(gateway.stop)
        facts = gateway.until("listening")
        yield Stand(stand_ins, gateway, facts["grpc_address"], facts["http_address"], identity.token)


def grpc_streams(place: Stand, channels: list[grpc.aio.Channel]) -> Stream:
    """InferenceService.Generate, over a few channels."""
    stubs: list[inference_pb2_grpc.InferenceServiceAsyncStub] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]

    async def stream(number: int, num_tokens: int, count: Count) -> None:
        sampling = types_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=number)
        request = inference_pb2.GenerateRequest(text=f"stream {number}", sampling=sampling)
        call = stubs[number % len(stubs)].Generate(request, metadata=(("authorization", f"Bearer {place.token}"),))
        async for event in call:
            if event.HasField("delta"):
                count.took(event.delta.first_position, len(event.delta.token_ids))

    return stream


def http_streams(place: Stand) -> Stream:
    """POST /v1/completions with server-sent events, a connection each."""
    host, _, port = place.http_address.rpartition(":")

    async def stream(number: int, num_tokens: int, count: Count) -> None:
        body = {
            "model": MODEL,
            "prompt": f"stream {number}",
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {place.http_address}\r\nauthorization: Bearer {place.token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read(400)!r}")
        num_had = 0
        async for text in reader:
            if text.startswith(b"data: [DONE]"):
                break
            if text.startswith(b"data: {"):
                num_new = len(orjson.loads(text[6:])["choices"][0]["text"])
                count.took(num_had, num_new)
                num_had += num_new
        writer.close()

    return stream


async def measure(place: Stand, stream: Stream, num_streams: int, num_tokens: int) -> Measured:
    """From the first step to the last word."""
    count = Count()
    streams: asyncio.Future[Any] = asyncio.gather(*(stream(number, num_tokens, count) for number in range(num_streams)))
    full: asyncio.Future[Any] = asyncio.create_task(asyncio.to_thread(place.stand_ins.until, "full"))
    await asyncio.wait({streams, full}, return_when=asyncio.FIRST_COMPLETED)
    cpu, began = place.cpu_seconds(), time.perf_counter()
    os.kill(place.stand_ins.pid, signal.SIGUSR1)
    stepping = await asyncio.to_thread(place.stand_ins.until, "stepping")
    await streams
    delays = [count.delay_seconds(stepping["at"], stepping["seconds"], share) for share in (0.5, 0.99)]
    return Measured(place.cpu_seconds() - cpu, time.perf_counter() - began, count, *delays)


async def run(place: Stand, arguments: argparse.Namespace) -> None:
    """Each face in turn."""
    channels = [rpc.channel(place.grpc_address) for _ in range(NUM_CHANNELS)]
    faces = {"grpc": grpc_streams(place, channels), "http": http_streams(place)}
    worst = math.inf
    for face in arguments.faces.split(","):
        await measure(place, faces[face], arguments.streams, WARM_TOKENS)
        found = await measure(place, faces[face], arguments.streams, arguments.tokens)
        num_wanted = arguments.streams * arguments.tokens
        worst = min(worst, num_wanted / found.cpu_seconds)
        show(line(f"gateway_lost_{face}", num_wanted - found.count.num_tokens, "tokens", 0, at_most=True))
        show(line(f"gateway_messages_{face}", found.count.num_messages / num_wanted, "messages to a client per delta"))
        show(line(f"gateway_delay_p50_{face}", 1e3 * found.delay_p50, "ms"))
        show(line(f"gateway_delay_p99_{face}", 1e3 * found.delay_p99, "ms"))
        show(line(f"gateway_busy_{face}", found.cpu_seconds / found.seconds, "of a core"))
        show(line(f"gateway_delta_us_{face}", 1e6 * found.cpu_seconds / num_wanted, "us of CPU"))
        show(line(f"gateway_deltas_per_core_{face}", num_wanted / found.cpu_seconds, "deltas/s", TARGET))
    show(line("gateway_deltas_per_core", worst, "deltas/s", TARGET))
    for channel in channels:
        await channel.close()


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--tokens", type=int, default=800, help="of each stream")
    parser.add_argument("--step", type=float, default=NUM_STREAMS / TARGET, help="seconds of a worker's step")
    parser.add_argument("--faces", default="grpc,http")
    arguments = parser.parse_args()
    with stand(arguments.streams, arguments.step) as place:
        asyncio.run(run(place, arguments))


if __name__ == "__main__":
    main()
