"""A worker and its models' weights: acts from schedulers are done between steps and answered, heartbeats say where weights are."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from forebay.v1 import scheduler_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.common import rpc
from services.worker.engine_loop import EngineLoop
from services.worker.model_orders import KEPT_SECONDS, ModelOrders
from services.worker.settings import WorkerSettings
from services.worker.sharing.device import SharedDevice
from services.worker.sharing.weights import Weights
from services.worker.sizing import Budget
from services.worker.worker import Worker
from tests.unit.worker.test_node import FAST as BEAT
from tests.unit.worker.test_node import FakeScheduler
from tests.worker_harness import FAST, Clock, ToyRunner, hear, toy, until

HOST, LOADING, DEVICE = scheduler_pb2.MODEL_PLACE_HOST, scheduler_pb2.MODEL_PLACE_LOADING, scheduler_pb2.MODEL_PLACE_DEVICE
SIZE = 4096


class Decoder:
    """Stands for a model's weights, which come when they are let."""

    def __init__(self) -> None:
        self.weights = torch.zeros(SIZE, dtype=torch.uint8)
        self.let_come = threading.Event()
        self.is_placed = True

    def move(self, place: torch.Tensor | None) -> None:
        self.is_placed = place is not None

    def bring(self) -> None:
        self.let_come.wait()


class Two:
    """A worker of two models with room for so many, and a scheduler that it is attached to."""

    def __init__(self, scheduler: FakeScheduler, worker: Worker, runners: dict[str, ToyRunner], decoders: dict[str, Decoder]) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.runners = runners
        self.decoders = decoders

    def beat(self) -> scheduler_pb2.Heartbeat:
        return self.scheduler.heartbeats[-1]

    def state(self, model: str) -> scheduler_pb2.ModelState:
        return next(state for state in self.beat().models if state.model == model)

    async def is_at(self, model: str, place: int) -> None:
        await until(lambda: bool(self.scheduler.heartbeats) and self.state(model).place == place)

    async def act(self, kind: int, model: str) -> scheduler_pb2.ModelActOutcome:
        act_id = f"act {len(self.scheduler.heartbeats)} {kind} {model}"
        act = scheduler_pb2.ModelAct(act_id=act_id, kind=scheduler_pb2.ModelActKind.ValueType(kind), model=model)
        self.scheduler.commands.put_nowait(scheduler_pb2.AttachResponse(model_act=act))

        def answers() -> list[scheduler_pb2.ModelActOutcome]:
            return [outcome for beat in self.scheduler.heartbeats for outcome in beat.outcomes if outcome.act_id == act_id]

        await until(lambda: bool(answers()))
        return answers()[0]

    def pin(self, *models: str) -> None:
        self.scheduler.commands.put_nowait(scheduler_pb2.AttachResponse(pins=scheduler_pb2.Pins(models=models)))


@asynccontextmanager
async def two(num_places: int = 2) -> AsyncIterator[Two]:
    runners = {name: ToyRunner() for name in ("a@fp32", "b@fp32")}
    models = [(engine, replace(served, model=name)) for name, (engine, served) in ((n, toy(r)) for n, r in runners.items())]
    decoders = {name: Decoder() for name in runners}
    weights = Weights(num_places * SIZE, decoders)
    async with FakeScheduler() as scheduler:
        settings = WorkerSettings(model="toy", schedulers=scheduler.address, worker_id="w1")
        worker = Worker(models, settings, pace=FAST, beat=BEAT, weights=weights, budget=Budget(num_places * SIZE, 100, 20, 3))
        await worker.start()
        try:
            await until(lambda: bool(scheduler.heartbeats))
            yield Two(scheduler, worker, runners, decoders)
        finally:
            for name in runners:
                decoders[name].let_come.set()
                runners[name].release()
            await worker.stop()


async def test_a_load_brings_weights_to_an_idle_device_and_an_unload_drops_them() -> None:
    async with two() as device:
        assert device.state("a@fp32").place == HOST
        outcome = await device.act(scheduler_pb2.MODEL_ACT_KIND_LOAD, "a@fp32")
        assert (outcome.refused, outcome.words) == (False, "is coming to the device")
        await device.is_at("a@fp32", LOADING)
        device.decoders["a@fp32"].let_come.set()
        await device.is_at("a@fp32", DEVICE)
        assert list(device.beat().loaded_models) == ["a@fp32"]
        assert device.state("a@fp32").load_seconds > 0
        assert device.state("b@fp32").load_seconds == device.state("a@fp32").load_seconds, "as large, by the same bus"
        assert not (await device.act(scheduler_pb2.MODEL_ACT_KIND_UNLOAD, "a@fp32")).refused
        await device.is_at("a@fp32", HOST)
        assert not device.decoders["a@fp32"].is_placed


def request_for(worker: Worker, model: str) -> worker_pb2.WorkerServiceGenerateRequest:
    return worker_pb2.WorkerServiceGenerateRequest(
        request_id="r",
        epoch=1,
        incarnation=worker.incarnation,
        org="acme",
        model=model,
        model_version="0123456789abcdef",
        latency_class=types_pb2.LATENCY_CLASS_STANDARD,
        cache_salt=b"s" * 32,
        prompt_token_ids=[1, 2, 3],
        sampling=types_pb2.SamplingParams(max_tokens=8, temperature=0, seed=1, n=1),
    )


async def test_what_has_requests_stays() -> None:
    async with two() as device, rpc.channel(device.worker.address) as channel:
        runner = device.runners["a@fp32"]
        device.decoders["a@fp32"].let_come.set()
        runner.hold_at_output(3)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Generate(request_for(device.worker, "a@fp32"))
        await call.read()
        await until(runner.held.is_set)
        asked = asyncio.create_task(device.act(scheduler_pb2.MODEL_ACT_KIND_UNLOAD, "a@fp32"))
        await until(lambda: bool(device.worker.loop._commands))
        runner.release()
        outcome = await asked
        assert (outcome.refused, outcome.words) == (True, "is in use by a request: try again when they have ended")
        assert (await hear(call)).kinds[-1] == "completed"


async def test_pins_are_all_that_schedulers_want_and_come_by_themselves() -> None:
    async with two(num_places=1) as device:
        assert "must hold the largest other model" in (await device.act(scheduler_pb2.MODEL_ACT_KIND_PIN, "a@fp32")).words
    async with two() as device:
        device.decoders["a@fp32"].let_come.set()
        for _ in range(2):  # as from two schedulers
            device.pin("a@fp32", "nobody@fp32")
        await device.is_at("a@fp32", DEVICE)
        assert list(device.beat().pins) == ["a@fp32", "nobody@fp32"]
        assert (device.state("a@fp32").pinned, device.state("b@fp32").pinned) == (True, False)
        device.pin()
        await until(lambda: not device.state("a@fp32").pinned)
        assert not device.beat().pins


async def test_acts_that_it_doesn_t_know_are_refused() -> None:
    async with two() as device:
        assert (await device.act(scheduler_pb2.MODEL_ACT_KIND_LOAD, "nobody@fp32")).words == "isn't served here"
        outcome = await device.act(99, "a@fp32")
        assert (outcome.refused, "knows no act 99" in outcome.words) == (True, True)


async def test_the_budget_is_told_by_name() -> None:
    async with two() as device:
        budget = device.beat().budget
        told = (budget.weights_bytes, budget.kv_bytes, budget.workspace_bytes, budget.reserve_bytes)
        assert told == (2 * SIZE, 100, 20, 3)
        assert device.state("a@fp32").num_bytes == SIZE


async def test_outcomes_are_told_for_some_seconds_and_no_longer() -> None:
    clock = Clock()
    orders = ModelOrders(EngineLoop(SharedDevice({}), clock=clock), [], None, lambda: None, clock)
    orders.act(scheduler_pb2.ModelAct(act_id="1", kind=scheduler_pb2.MODEL_ACT_KIND_LOAD, model="a"))
    await until(lambda: len(orders.outcomes()) == 1)
    clock.forward(KEPT_SECONDS)
    assert len(orders.outcomes()) == 1
    clock.forward(0.1)
    assert orders.outcomes() == []
