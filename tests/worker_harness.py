"""A worker in this process around a toy engine whose steps a test can hold, delay and break."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import httpx

from forebay.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common import rpc
from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import PositionLogprobs, SequenceError, TokenLogprob
from services.worker.engine.sampler import Sample
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.verification import take_run
from services.worker.node import Beat
from services.worker.outbox import Pace
from services.worker.settings import WorkerSettings
from services.worker.wire import Served
from services.worker.worker import Worker

VOCAB_SIZE = 1000
EOS = 999
FAST = Pace(delta_seconds=0.001)
Response = worker_pb2.WorkerServiceGenerateResponse
Call = grpc.aio.UnaryStreamCall[worker_pb2.WorkerServiceGenerateRequest, Response]


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for a condition that something else brings about."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never came true"
        await asyncio.sleep(0.001)


def next_token(tokens: list[int]) -> int:
    """What the toy model says: it depends on the whole text and is never the end token."""
    return (31 * sum(tokens) + 7 * len(tokens)) % (VOCAB_SIZE - 1)


def toy_token(sequence: Sequence, drafted: tuple[int, ...] = ()) -> int:
    """The token of a sequence behind so many drafts."""
    return (next_token([*sequence.tokens, *drafted]) + sequence.choice_index) % (VOCAB_SIZE - 1)


def continuation(prompt: list[int], count: int, choice_index: int = 0) -> list[int]:
    """The output of the toy model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((next_token(tokens) + choice_index) % (VOCAB_SIZE - 1))
    return tokens[len(prompt) :]


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds


class ToyRunner:
    """Computes the next token from the sequence alone. A test holds it before a step, or makes it raise."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.failing: set[tuple[str, int]] = set()  # (request id, output position) where SequenceError comes
        self.breaks_at_step: int | None = None  # there the whole engine fails
        self.before_step: Callable[[], None] = lambda: None
        self._holds: Callable[[Batch], bool] = lambda _: False
        self._released = threading.Event()
        self.held = threading.Event()  # a step hangs now

    def hold(self, when: Callable[[Batch], bool] = lambda _: True) -> None:
        """The next step for which `when` is true hangs until `release`."""
        self._released.clear()
        self.held.clear()
        self._holds = when

    def hold_later(self, when: Callable[[Batch], bool]) -> None:
        """Lets the step that hangs run, and those behind it up to one for which `when` is true."""
        released, self._released = self._released, threading.Event()
        self.held.clear()
        self._holds = when
        released.set()

    def hold_at_output(self, count: int) -> None:
        """Hangs where a sequence with so many output tokens would get its next."""
        self.hold(lambda batch: any(span.sequence.num_output_tokens >= count for span in batch.spans))

    def hold_at_step(self, number: int) -> None:
        """Hangs in the step of this number, from 1."""
        self.hold(lambda _: self.num_steps + 1 >= number)

    def release(self) -> None:
        """Lets every step run."""
        self._holds = lambda _: False
        self._released.set()

    def copy(self, batch: Batch) -> None:
        """Its tokens depend on no block."""

    def execute(self, batch: Batch) -> list[SpanResult]:
        if self._holds(batch):
            self.held.set()
            self._released.wait()
        self.before_step()
        self.num_steps += 1
        if self.breaks_at_step is not None and self.num_steps >= self.breaks_at_step:
            raise RuntimeError("the device is gone")
        return [self._result(span) for span in batch.spans]

    def _result(self, span: Span) -> SpanResult:
        sequence = span.sequence
        if not span.samples:
            return SpanResult()
        name = sequence.request_id.partition("#")[0]
        if (name, sequence.num_output_tokens) in self.failing:
            return SpanResult(error=SequenceError(sequence.request_id, sequence.choice_index, "NaN logits"))
        result = SpanResult()
        top = tuple(TokenLogprob(other, -1.0) for other in range(sequence.sampling.logprobs or 0))
        samples = []
        for num_drafts in range(len(span.sampled)):
            token = toy_token(sequence, span.draft.token_ids[:num_drafts])
            samples.append(Sample(token, PositionLogprobs(TokenLogprob(token, -0.5), top) if top else None))
        take_run(span, samples, result)
        return result


@dataclass
class Harness:
    """A worker that serves, and a client of it."""

    worker: Worker
    engine: Engine
    runner: ToyRunner
    served: Served
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    http: httpx.AsyncClient

    def request(
        self, request_id: str = "r", *, prompt: list[int] | None = None, **changes: object
    ) -> worker_pb2.WorkerServiceGenerateRequest:
        """A good request; `changes` are fields of it, or of its sampling parameters."""
        sampling = types_pb2.SamplingParams(max_tokens=8, temperature=0, seed=1, n=1)
        request = worker_pb2.WorkerServiceGenerateRequest(
            request_id=request_id,
            epoch=1,
            incarnation=self.worker.incarnation,
            org="acme",
            model=self.served.model,
            model_version=self.served.version,
            latency_class=types_pb2.LATENCY_CLASS_STANDARD,
            cache_salt=b"s" * 32,
            prompt_token_ids=prompt or [1, 2, 3],
            sampling=sampling,
        )
        fields = {field.name for field in request.DESCRIPTOR.fields}
        request.MergeFrom(worker_pb2.WorkerServiceGenerateRequest(**{k: v for k, v in changes.items() if k in fields}))
        request.sampling.MergeFrom(types_pb2.SamplingParams(**{k: v for k, v in changes.items() if k not in fields}))
        return request

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a series on the internal port."""
        text = (await self.http.get("/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.partition("{")[0] == name and all(label in line for label in wanted)]
        assert len(lines) == 1, (name, lines)
        return float(lines[0].rpartition(" ")[2])

    async def idle(self, seconds: float = 20.0) -> None:
        """Waits until nothing is left of any request, and checks the engine's books."""
        await until(lambda: not len(self.worker.leases) and not self.engine.has_work, seconds)
        await until(lambda: self.worker.loop.last_turn.stats[self.served.model].num_used_blocks == 0, seconds)
        self.engine.check_integrity()


@dataclass
class Heard:
    """What a stream said."""

    events: list[Response] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """accepted, deltas, ping, completed; in order."""
        return [str(event.WhichOneof("event")) for event in self.events]

    @property
    def deltas(self) -> list[worker_pb2.TokenDelta]:
        """Every delta, in order."""
        return [delta for event in self.events if event.HasField("deltas") for delta in event.deltas.deltas]

    def tokens(self, choice_index: int = 0) -> list[int]:
        """A choice's tokens; asserts that their positions join up."""
        tokens: list[int] = []
        start = 0
        for delta in self.deltas:
            if delta.choice_index == choice_index:
                start = start if tokens else delta.first_position
                assert delta.first_position == start + len(tokens)
                tokens += delta.token_ids
        return tokens


async def hear(call: Call) -> Heard:
    """Reads a stream to its end. AioRpcError where it fails."""
    heard = Heard()
    while isinstance(event := await call.read(), Response):
        heard.events.append(event)
    return heard


def toy(
    runner: ToyRunner,
    *,
    num_blocks: int = 64,
    max_sequences: int = 8,
    max_step_tokens: int = 64,
    host_blocks: int = 0,
    swap_blocks: int = 0,
    speculator: Speculator | None = None,
) -> tuple[Engine, Served]:
    """The real engine on a toy runner, with blocks of 4 tokens."""
    config = EngineConfig(
        block_size=4,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        host_blocks=host_blocks,
        swap_blocks=swap_blocks,
    )
    engine = Engine(runner, config, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], speculator=speculator, clock=lambda: 0.0)
    return engine, Served(
        "toy@fp32", "0123456789abcdef", "toy", VOCAB_SIZE, block_size=4, num_blocks=num_blocks, max_model_len=4 * num_blocks
    )


@asynccontextmanager
async def serving(
    *,
    pace: Pace = FAST,
    beat: Beat | None = None,
    schedulers: str = "",
    num_blocks: int = 64,
    max_sequences: int = 8,
    max_step_tokens: int = 64,
    speculator: Speculator | None = None,
    host_blocks: int = 0,
    swap_blocks: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Harness]:
    """A worker on free ports, stopped at the end."""
    runner = ToyRunner()
    engine, served = toy(
        runner,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        host_blocks=host_blocks,
        swap_blocks=swap_blocks,
        speculator=speculator,
    )
    settings = WorkerSettings(model="toy", schedulers=schedulers, max_sequences=max_sequences, worker_id="w1")
    worker = Worker([(engine, served)], settings, pace=pace, beat=beat, clock=clock)
    await worker.start()
    try:
        async with rpc.channel(worker.address) as channel, httpx.AsyncClient(base_url=f"http://{worker.internal_address}") as http:
            yield Harness(worker, engine, runner, served, worker_pb2_grpc.WorkerServiceStub(channel), http)
    finally:
        runner.release()
        await worker.stop()
