"""A worker put together: engines and their thread, leases, gRPC service, schedulers, internal port; and its way up and down."""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from forebay.v1 import scheduler_pb2, worker_pb2, worker_pb2_grpc
from services.common import log, rpc
from services.common.address import reachable, split, with_port
from services.common.callers import Callers
from services.common.errors import Code, StatusError, unavailable
from services.common.process import InternalHttp
from services.common.tls import Identity
from services.worker.engine.config import EngineConfig
from services.worker.engine.encoder import Encoder
from services.worker.engine.engine import Engine
from services.worker.engine_loop import EngineLoop
from services.worker.flight_record import InFlight
from services.worker.leases import MAX_WAITING, Leases
from services.worker.metrics import WorkerMetrics
from services.worker.model_orders import ModelOrders, budget_to_proto
from services.worker.node import Beat, Node
from services.worker.outbox import Pace
from services.worker.server import CALLERS, WorkerService
from services.worker.settings import WorkerSettings
from services.worker.sharing.arena import Arena
from services.worker.sharing.device import SharedDevice, Stats
from services.worker.sharing.weights import Weights
from services.worker.sizing import Budget
from services.worker.spans import StepSpans
from services.worker.telemetry import Sensors, device_name
from services.worker.throughput import Throughput
from services.worker.turn import Turn
from services.worker.watchdog import Pauses
from services.worker.wire import Served, in_flight, step_time_model

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

WATCH_SECONDS = 0.25

_logger = log.get(__name__)


class EngineFailed(Exception):
    """The engine failed or hangs: the process has to end and be started again."""


class Worker:
    """One device in service. start, until, drain, stop: in this order, each once."""

    def __init__(
        self,
        models: Sequence[tuple[Engine | Encoder, Served]],
        settings: WorkerSettings,
        *,
        pace: Pace | None = None,
        beat: Beat | None = None,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
        died_with: Sequence[InFlight] = (),
        arena: Arena | None = None,
        weights: Weights | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`clock` times the engines' steps, and so tells when they hang. `died_with`: what the last start's last step held."""
        self._died_with = died_with
        self._identity = identity
        self.incarnation = secrets.token_hex(8)
        engines = {served.model: engine for engine, served in models}
        tenants = {model: engine for model, engine in engines.items() if isinstance(engine, Engine)}
        self._models = {served.model: served for _, served in models}
        self._max_step_tokens = max(engine.max_step_tokens for engine in engines.values())
        self._settings = settings
        self._budget = budget
        registry = CollectorRegistry()
        self._metrics = _metrics(registry, self._models.values(), settings)
        self.loop = EngineLoop(SharedDevice(engines, arena, tenants, weights), clock=clock, observe=self._observe)
        self._orders = ModelOrders(self.loop, list(self._models), weights, lambda: self.node.nudge(), clock)
        self.leases = Leases(
            self.loop, self._metrics.models, max_sequences=settings.max_sequences, preemption=settings.preemption, pace=pace
        )
        self._service = WorkerService(self.leases, self._models, self.incarnation, pace=pace)
        self._sensors = Sensors(settings.device)
        self._metrics.watch(lambda: self.loop.last_turn.stats, lambda: self.loop.num_stale_outputs, self._sensors, weights)
        self._metrics.describe_caches([_cache_facts(engine.config, served) for engine, served in models if isinstance(engine, Engine)])
        self._server = rpc.server([Callers(CALLERS)] if identity else [])
        self._internal = InternalHttp(settings.internal_address, registry, self.why_not_ready, sound=self._why_not_sound)
        self._beat = beat
        self._step_spans = StepSpans()
        self._num_used_blocks = 0  # after the last turn
        self._drained = self._leaving = False
        self._drain: asyncio.Task[None] | None = None
        self.address = ""
        self.internal_address = ""

    async def start(self) -> None:
        """Listens, and begins to attach. OSError names an address that is taken."""
        settings = self._settings
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._service, self._server)
        self._health = rpc.add_standard_services(self._server, [SERVICE_NAME], internal=True)
        port = rpc.bind(self._server, settings.listen_address, self._identity)
        self.address = with_port(settings.listen_address, port)
        internal_port = await self._internal.start()
        self.internal_address = with_port(settings.internal_address, internal_port)
        self.loop.start()
        await self._server.start()
        self.node = Node(
            settings.scheduler_addresses,
            self._register(),
            self.heartbeat,
            self.leases.revoke,
            self.set_drained,
            act=self._orders.act,
            pin=self._orders.pin,
            beat=self._beat,
            identity=self._identity,
        )
        self.leases.on_room = self.node.nudge
        self.node.start()
        self._watch = asyncio.create_task(self._watch_health(), name="watch health")

    async def until(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set. EngineFailed when the engine is lost."""
        stopped = asyncio.create_task(stop.wait())
        any_of: set[asyncio.Future[Any]] = {stopped, self._watch, self.loop.failed}
        await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        self._leaving = True
        if self.loop.failed.done():
            raise EngineFailed(f"the engine failed: {self.loop.failed.result()!r}")
        if self._watch.done():
            self._watch.result()

    async def drain(self, seconds: float) -> None:
        """Takes no new work and lets what runs go on for so long; what is left then has to be placed again."""
        self.leases.draining = True
        await rpc.set_health(self._health, serving=False, service_names=[SERVICE_NAME])
        self.node.nudge()
        _logger.info("draining", num_requests=len(self.leases), seconds=seconds)
        if not await self.leases.idle(seconds):
            self.leases.fail_all(StatusError(Code.UNAVAILABLE, "this worker is stopping; place again", reason="DRAINED"))

    def set_drained(self, drained: bool) -> None:
        """An operator takes it out of service, or puts it back. Idempotent; of no effect on a worker that is about to go."""
        if drained == self._drained or self._leaving:
            return
        self._drained = drained
        if self._drain is not None:
            self._drain.cancel()
        self._drain = asyncio.create_task(self.drain(self._settings.drain_seconds) if drained else self._come_back(), name="drain")

    async def _come_back(self) -> None:
        self.leases.draining = False
        await rpc.set_health(self._health, serving=self.loop.healthy, service_names=[SERVICE_NAME])
        self.node.nudge()
        _logger.info("back in service")

    async def stop(self) -> None:
        """Leaves the schedulers, ends the calls, the thread and the ports."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        if self._drain is not None:
            self._drain.cancel()
        self._orders.stop()
        await self.node.stop()
        self._service.close()
        await self._server.stop(grace=0.5)
        await self.loop.stop(5.0 if self.loop.healthy else 0.5)
        await self._internal.stop()

    def why_not_ready(self) -> str | None:
        """None when the worker takes work."""
        if self.leases.draining:
            return "draining"
        if (reason := self._why_not_sound()) is not None:
            return reason
        if self._settings.scheduler_addresses and not self.node.num_attached:
            return "no scheduler has been reached"
        return None

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """The worker as it is now."""
        by_model, reading = self.loop.last_turn.stats, self._sensors.read()
        stats, states = by_model.values(), self._orders.states(by_model)
        return scheduler_pb2.Heartbeat(
            leases=self.leases.progress(),
            num_used_blocks=sum(s.num_used_blocks for s in stats),
            num_cached_blocks=sum(s.num_cached_blocks for s in stats),
            num_running=sum(s.num_running for s in stats),
            num_waiting=sum(s.num_waiting for s in stats),
            utilization=self.loop.utilization,
            step_seconds=self.loop.step_seconds,
            tokens_per_second=self.loop.tokens_per_second,
            memory_used_bytes=reading.memory_used_bytes,
            memory_total_bytes=reading.memory_total_bytes,
            temperature_celsius=reading.temperature_celsius,
            power_watts=reading.power_watts,
            draining=self.leases.draining,
            drained=self._drained,
            healthy=self.loop.healthy,
            class_usage=self.leases.class_usage(),
            loaded_models=[state.model for state in states if state.place == scheduler_pb2.MODEL_PLACE_DEVICE],
            step_time=_slowest(stats),
            num_prefill_tokens=sum(s.num_prefill_tokens for s in stats),
            celsius_per_second=self._sensors.celsius_per_second,
            models=states,
            outcomes=self._orders.outcomes(),
            pins=self._orders.pins,
            budget=budget_to_proto(self._budget) if self._budget is not None else None,
        )

    def _register(self) -> scheduler_pb2.Register:
        settings, reading = self._settings, self._sensors.read()
        return scheduler_pb2.Register(
            worker_id=settings.worker_id or f"{socket.gethostname()}-{split(self.address)[1]}",
            incarnation=self.incarnation,
            address=settings.advertised_address or reachable(self.address, socket.gethostname()),
            node_id=settings.node_id or socket.gethostname(),
            device=device_name(settings.device),
            models=map(_told, self._models.values()),
            max_sequences=settings.max_sequences,
            max_waiting=MAX_WAITING,
            region=settings.region,
            died_with=[in_flight(entry) for entry in self._died_with],
            max_step_tokens=self._max_step_tokens,
            capacity=scheduler_pb2.Capacity(
                memory_bytes=reading.memory_total_bytes,
                memory_bytes_per_second=settings.memory_bytes_per_second or reading.memory_bytes_per_second,
                flops=settings.flops,
                slowdown_celsius=settings.slowdown_celsius or reading.slowdown_celsius,
            ),
        )

    def _observe(self, turn: Turn) -> None:
        for model in {step.model for step in turn.steps}:
            steps = [step for step in turn.steps if step.model == model]
            self._metrics.models[model].observe_steps([step.num_tokens for step in steps], sum(step.seconds for step in steps))
        if turn.steps:
            self._step_spans.observe(turn.steps, self.leases.spans(output.request_id for output in turn.outputs))
        num_used_blocks = sum(stats.num_used_blocks for stats in turn.stats.values())
        if num_used_blocks < self._num_used_blocks:
            self.node.nudge()
        self._num_used_blocks = num_used_blocks

    def _why_not_sound(self) -> str | None:
        if self.loop.failed.done():
            return "the engine has failed"
        if not self.loop.healthy:
            seconds, limit = self.loop.stalled_seconds, self.loop.limit.seconds
            return f"the step loop has had work and made no progress for {seconds:.0f} s (limit {limit:.0f})"
        return None

    async def _watch_health(self) -> None:
        """Tells health checks what the step loop does, and sends its streams elsewhere where it stalls. EngineFailed: for good."""
        told: bool | None = None
        pauses = Pauses(asyncio.get_running_loop().time())
        while True:
            self.loop.forgive(pauses.look(asyncio.get_running_loop().time()))
            healthy = self.loop.healthy
            if healthy != told:
                told = healthy
                self._metrics.tell_healthy(healthy)
                await rpc.set_health(self._health, serving=healthy and not self.leases.draining, service_names=[SERVICE_NAME])
                self.node.nudge()
            if not healthy:
                self.leases.fail_all(unavailable("the step loop hangs; place again", reason="ENGINE_HANGS"))
            if self.loop.lost:
                raise EngineFailed(f"the step loop has made no progress for {self.loop.stalled_seconds:.0f} s")
            await asyncio.sleep(WATCH_SECONDS)


def _metrics(registry: CollectorRegistry, models: Collection[Served], settings: WorkerSettings) -> WorkerMetrics:
    throughputs = {
        served.model: Throughput(num_blocks=served.num_blocks, block_size=served.block_size, max_sequences=settings.max_sequences)
        for served in models
    }
    return WorkerMetrics(registry, throughputs, max_model_len=max(served.max_model_len for served in models))


def _slowest(stats: Iterable[Stats]) -> scheduler_pb2.StepTimeModel | None:
    """The step times of the model that takes longest: a worker tells one for all that it serves."""
    known = [s.step_time for s in stats if s.step_time is not None]
    return step_time_model(max(known)) if known else None


def _told(served: Served) -> scheduler_pb2.WorkerModel:
    return scheduler_pb2.WorkerModel(
        model=served.model,
        version=served.version,
        block_size=served.block_size,
        num_blocks=served.num_blocks,
        max_model_len=served.max_model_len,
        loaded=True,
        fingerprint=served.fingerprint,
        max_call_tokens=served.max_call_tokens,
    )


def _cache_facts(config: EngineConfig, served: Served) -> dict[str, object]:
    """As vLLM names them."""
    return {
        "block_size": served.block_size,
        "cache_dtype": config.cache_format,
        "enable_prefix_caching": config.prefix_cache,
        "kv_cache_size_tokens": served.num_blocks * served.block_size,
        "num_cpu_blocks": config.host_blocks,
        "num_gpu_blocks": served.num_blocks,
    }
