"""What schedulers want done with the models' weights, and what a heartbeat says of these: where they are, what became of each act."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

from forebay.v1 import scheduler_pb2
from services.common import log
from services.worker.engine_loop import EngineLoop
from services.worker.sharing.device import Stats
from services.worker.sharing.orders import Kind, Outcome
from services.worker.sharing.residency import MIN_STAY_SECONDS, Place, Resident
from services.worker.sharing.weights import Weights
from services.worker.sizing import Budget
from services.worker.wire import step_time_model

KEPT_SECONDS = 5.0
"""For so long heartbeats tell of an outcome: each scheduler hears it, be one late."""
MAX_OUTCOMES = 64

PLACES = {
    Place.COLD: scheduler_pb2.MODEL_PLACE_COLD,
    Place.HOST: scheduler_pb2.MODEL_PLACE_HOST,
    Place.ARRIVING: scheduler_pb2.MODEL_PLACE_LOADING,
    Place.DEVICE: scheduler_pb2.MODEL_PLACE_DEVICE,
}

_logger = log.get(__name__)


class ModelOrders:
    """Lives on the event loop; what concerns the device is asked of its thread."""

    def __init__(
        self, loop: EngineLoop, models: Sequence[str], weights: Weights | None, news: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """`news` is called when heartbeats have more to tell. `clock` is the engines'."""
        self._loop = loop
        self._models = models
        self._weights = weights
        self._news = news
        self._clock = clock
        self._outcomes: deque[tuple[float, scheduler_pb2.ModelActOutcome]] = deque(maxlen=MAX_OUTCOMES)
        self._tasks: set[asyncio.Task[None]] = set()
        self.pins: tuple[str, ...] = ()
        """Whom schedulers want pinned, whether they could be or not."""

    def act(self, act: scheduler_pb2.ModelAct) -> None:
        """A scheduler wants something done; its outcome goes with the next heartbeats."""
        self._start(self._act(act))

    def pin(self, models: Iterable[str]) -> None:
        """All models that schedulers want pinned here. Idempotent."""
        pins = tuple(sorted(set(models)))
        if pins != self.pins:
            self.pins = pins
            _logger.info("pins", models=pins)
            self._start(self._pin(pins))

    def stop(self) -> None:
        """Nobody is told any more."""
        for task in self._tasks:
            task.cancel()

    def outcomes(self) -> list[scheduler_pb2.ModelActOutcome]:
        """Of the acts of the last seconds."""
        while self._outcomes and self._clock() - self._outcomes[0][0] > KEPT_SECONDS:
            self._outcomes.popleft()
        return [outcome for _, outcome in self._outcomes]

    def states(self, stats: Mapping[str, Stats]) -> list[scheduler_pb2.ModelState]:
        """Where each model's weights are."""
        return [self._state(model, stats[model]) for model in self._models]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _act(self, act: scheduler_pb2.ModelAct) -> None:
        if act.model not in self._models:
            outcome = Outcome("isn't served here", refused=True)
        elif act.kind not in (kind.value for kind in Kind):
            outcome = Outcome(f"this worker knows no act {act.kind}: it is of an earlier version", refused=True)
        else:
            kind = Kind(act.kind)
            outcome = await self._loop.ask(lambda device, now: device.obey(kind, act.model, now))
            _logger.info("model_act", act=kind.name.lower(), model=act.model, words=outcome.words, refused=outcome.refused)
        if not act.act_id:  # nobody waits for a word
            return
        told = scheduler_pb2.ModelActOutcome(act_id=act.act_id, refused=outcome.refused, words=outcome.words)
        self._outcomes.append((self._clock(), told))
        self._news()

    async def _pin(self, pins: tuple[str, ...]) -> None:
        await self._loop.ask(lambda device, _: device.pin(pins))
        self._news()

    def _state(self, model: str, stats: Stats) -> scheduler_pb2.ModelState:
        resident = self._weights.residency.residents.get(model) if self._weights is not None else None
        state = scheduler_pb2.ModelState(
            model=model,
            place=scheduler_pb2.MODEL_PLACE_DEVICE if resident is None else PLACES[resident.place],
            num_requests=stats.num_running + stats.num_waiting,
            num_used_blocks=stats.num_used_blocks,
            step_time=step_time_model(stats.step_time) if stats.step_time is not None else None,
        )
        if resident is not None and self._weights is not None:
            state.pinned, state.num_bytes, state.failure = resident.pinned, resident.num_bytes, resident.failure or ""
            state.stay_seconds = _stay_seconds(resident, self._clock())
            if (seconds := self._weights.residency.seconds_to_load(model)) is not None:
                state.load_seconds = seconds if resident.place is not Place.ARRIVING else _left(seconds, resident, self._clock())
        return state


def _left(seconds: float, resident: Resident, now: float) -> float:
    return max(0.0, resident.came_at + seconds - now)


def _stay_seconds(resident: Resident, now: float) -> float:
    return max(0.0, resident.came_at + MIN_STAY_SECONDS - now) if resident.is_on_device else 0.0


def budget_to_proto(budget: Budget) -> scheduler_pb2.DeviceBudget:
    """For heartbeats."""
    return scheduler_pb2.DeviceBudget(
        weights_bytes=budget.weights, kv_bytes=budget.kv, workspace_bytes=budget.workspace, reserve_bytes=budget.reserve
    )
