"""What operators want done with models on workers: acts that are done once, and pins, which last and which all schedulers share."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from forebay.v1 import scheduler_pb2
from services.common.errors import Code, StatusError, unavailable
from services.scheduler import keys
from services.scheduler.audit import Act, Audit
from services.scheduler.registry import Registry
from services.scheduler.store import Store

MAX_PINS = 10_000
ANSWER_SECONDS = 3.0
"""For so long a worker's word is waited for."""

Kind: TypeAlias = "scheduler_pb2.ModelActKind.ValueType"
Send = Callable[[scheduler_pb2.AttachResponse], Awaitable[None]]
"""Writes to a worker's Attach stream."""

_PIN, _UNPIN = scheduler_pb2.MODEL_ACT_KIND_PIN, scheduler_pb2.MODEL_ACT_KIND_UNPIN


@dataclass(frozen=True)
class Outcome:
    """What a worker says to an act."""

    worker_id: str
    refused: bool
    words: str


class ModelActs:
    """Pins are read at a start, when another scheduler tells of a change, and once a second in case its word was lost."""

    def __init__(self, store: Store, registry: Registry, instance: str) -> None:
        self._store = store
        self._registry = registry
        self._instance = instance
        self._numbers = itertools.count(1)
        self._links: dict[str, tuple[object, Send]] = {}  # by worker
        self._asked: dict[str, asyncio.Future[Outcome]] = {}  # by act
        self._pins: frozenset[tuple[str, str]] = frozenset()

    async def refresh(self) -> None:
        """StatusError UNAVAILABLE while Redis is away: what was read last stays."""
        (fields,) = await self._store.commands(["HKEYS", keys.PINS])
        self._pins = frozenset((str(worker), str(model)) for worker, model in map(json.loads, fields))

    def pins_of(self, registration: scheduler_pb2.Register) -> list[str]:
        """Whom operators want pinned there, in the order of names."""
        names = ("", registration.worker_id, registration.node_id)
        return sorted({m.model for m in registration.models if any((name, m.model) in self._pins for name in names)})

    def attach(self, worker_id: str, stream: object, send: Send) -> None:
        """A worker can be written to on this stream; an older one is forgotten."""
        self._links[worker_id] = stream, send

    def detach(self, worker_id: str, stream: object) -> None:
        """The stream has ended."""
        if self._links.get(worker_id, (None, None))[0] is stream:
            del self._links[worker_id]

    def hear(self, worker_id: str, outcomes: Iterable[scheduler_pb2.ModelActOutcome]) -> None:
        """A heartbeat has told what became of acts, of other schedulers' among them."""
        for told in outcomes:
            asked = self._asked.get(told.act_id)
            if asked is not None and not asked.done():
                asked.set_result(Outcome(worker_id, told.refused, told.words))

    async def send(self, worker_id: str, kind: Kind, model: str, act_id: str = "") -> None:
        """Tells a worker to do something. StatusError UNAVAILABLE where it isn't attached here."""
        act = scheduler_pb2.ModelAct(act_id=act_id, kind=kind, model=model)
        await self._write(worker_id, scheduler_pb2.AttachResponse(model_act=act))

    async def _write(self, worker_id: str, response: scheduler_pb2.AttachResponse) -> None:
        try:
            _, send = self._links[worker_id]
            await send(response)
        except (KeyError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:  # not here, or its stream has just ended
            raise unavailable(f"worker {worker_id} isn't attached: try again when it is", 1.0, "WORKER_AWAY") from error

    async def set(self, audit: Audit, act: Act, kind: Kind, worker: str, now: float) -> list[Outcome]:
        """Has it done by one worker or node, or all that serve the model; what each says to it, by worker.

        NOT_FOUND: no such model, or not there. FAILED_PRECONDITION: each has refused, with its reasons.
        """
        model = self._full_name(act.target, now)
        await self.refresh()
        pins = [(worker, model)] if kind == _PIN else self._pins_to_take(model, worker) if kind == _UNPIN else []
        workers = self._servers(model, worker, now)
        if not workers and not (pins and kind == _UNPIN):  # of what is gone a pin can be taken back
            raise StatusError(Code.NOT_FOUND, f"{model} isn't served by {worker}: `forebay ps` shows who serves what")
        outcomes = list(await asyncio.gather(*(self._ask(worker_id, kind, model) for worker_id in workers)))
        if outcomes and all(outcome.refused for outcome in outcomes):
            words = "; ".join(f"on {outcome.worker_id} it {outcome.words}" for outcome in outcomes)
            raise StatusError(Code.FAILED_PRECONDITION, f"{model}: {words}", reason="MODEL_ACT_REFUSED")
        if not pins:
            await audit.done(act)
        for pin in pins:
            await audit.change(act, keys.PINS, json.dumps(pin), act.actor if kind == _PIN else "", most=MAX_PINS)
        await self.refresh()
        await self._tell_pins()
        return outcomes

    def _pins_to_take(self, model: str, worker: str) -> list[tuple[str, str]]:
        """All of the model, or that of one name. FAILED_PRECONDITION where another pin would still hold it."""
        others = sorted(name for name, pinned in self._pins if pinned == model and name != worker)
        if not worker:
            return [(name, model) for name, pinned in self._pins if pinned == model]
        if (worker, model) not in self._pins and "" in others:
            raise StatusError(
                Code.FAILED_PRECONDITION, f"{model} is pinned on all workers, not on {worker} alone: unpin it without a worker"
            )
        return [(worker, model)] if (worker, model) in self._pins else []

    async def _tell_pins(self) -> None:
        for worker_id in list(self._links):
            registration = self._registry.registration(worker_id)
            if registration is not None:
                with suppress(StatusError):  # it is told when it is back
                    await self._write(worker_id, pins_message(self.pins_of(registration)))

    async def _ask(self, worker_id: str, kind: Kind, model: str) -> Outcome:
        """What the worker says, or that it doesn't."""
        act_id = f"{self._instance}/{next(self._numbers)}"
        asked: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._asked[act_id] = asked
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.send(worker_id, kind, model, act_id)
                return await asked
        except TimeoutError:
            return Outcome(worker_id, refused=True, words=f"isn't known to have changed: the worker said nothing for {ANSWER_SECONDS:g} s")
        except StatusError as error:
            return Outcome(worker_id, refused=True, words=f"stays as it is: {error.message}")
        finally:
            del self._asked[act_id]

    def _full_name(self, name: str, now: float) -> str:
        """With its level. NOT_FOUND, INVALID_ARGUMENT: no model, or several."""
        served = {model for worker in self._registry.known(now) for model in worker.models} | {model for _, model in self._pins}
        found = [name] if name in served else sorted(model for model in served if model.rpartition("@")[0] == name)
        if not found:
            raise StatusError(Code.NOT_FOUND, f"no worker serves {name}: `forebay models` lists what there is")
        if len(found) > 1:
            raise StatusError(Code.INVALID_ARGUMENT, f"{name} is served as {' and '.join(found)}: say which")
        return found[0]

    def _servers(self, model: str, worker: str, now: float) -> Collection[str]:
        names = set(self._registry.named(worker, now)) if worker else None
        if names is not None and not names:
            raise StatusError(Code.NOT_FOUND, f"there is no worker and no node {worker}: `forebay ps` lists them")
        return sorted(w.worker_id for w in self._registry.known(now) if model in w.models and (names is None or w.worker_id in names))


def pins_message(models: Iterable[str]) -> scheduler_pb2.AttachResponse:
    """For a worker: all that it is to pin."""
    return scheduler_pb2.AttachResponse(pins=scheduler_pb2.Pins(models=models))
