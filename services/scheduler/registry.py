"""The workers attached to this scheduler: who they are, their last heartbeat, and whether new work may go there.

Time is passed in (monotonic seconds). What room they have is Redis's to say, not this module's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from forebay.v1 import admin_pb2, scheduler_pb2
from services.scheduler.policy.backlog import Backlog
from services.scheduler.policy.fleet import ServedModel, Worker, serves
from services.scheduler.policy.health import Gate
from services.scheduler.policy.node import SLOWDOWN_CELSIUS, NodeState, StepCost, prefill_rate
from services.scheduler.policy.order import Ticket

UNMEASURED_BYTES_PER_SECOND = 5e9
"""At which weights are taken to come where the worker hasn't measured it yet."""
NEVER_SECONDS = 3600.0
"""What a model counts that can't be served there: its requests go elsewhere while they can, else they hear the reason there."""
FORGET_SECONDS = 60.0
"""How long a worker that has left is still shown, and still counts when judging what the fleet could ever hold."""


@dataclass
class Attached:
    """One worker. `stream` tells this attachment from an earlier one of the same worker; None when it has left."""

    registration: scheduler_pb2.Register
    stream: object | None
    seen_at: float
    heartbeat: scheduler_pb2.Heartbeat | None = None
    worker: Worker = field(init=False)
    """The policy's view of it, with no room in use."""

    def __post_init__(self) -> None:
        self.worker = as_worker(self.registration)

    def not_ready_reason(self, now: float, liveness_seconds: float) -> str:
        """Why no new work goes there, for people; empty if it does."""
        silent = now - self.seen_at
        if self.stream is None:
            return f"its stream ended {silent:.0f} s ago"
        if silent > liveness_seconds:
            return f"no heartbeat for {silent:.1f} s"
        if self.heartbeat is not None and self.heartbeat.draining:
            return "draining"
        if self.heartbeat is not None and not self.heartbeat.healthy:
            return "its engine has work and makes no progress"
        if not any(model.loaded for model in self.registration.models):
            return "no model is loaded yet"
        return ""


class Registry:
    """By worker id. The newest stream of a worker is the one that counts."""

    def __init__(
        self,
        *,
        liveness_seconds: float,
        backlog: Backlog | None = None,
        drained: Callable[[scheduler_pb2.Register], bool] = lambda _: False,
    ) -> None:
        """`backlog` hears of each heartbeat. `drained`: whether operators have taken a worker out of service."""
        self._liveness_seconds = liveness_seconds
        self._drained = drained
        self._backlog = backlog or Backlog()
        self._gate = Gate()
        self._workers: dict[str, Attached] = {}
        self._last_served: dict[tuple[str, str], float] = {}

    def attach(self, registration: scheduler_pb2.Register, stream: object, now: float) -> None:
        """A worker has introduced itself on this stream."""
        self._workers[registration.worker_id] = Attached(registration, stream, now)
        self._note_served(self._workers[registration.worker_id], now)

    def beat(self, worker_id: str, stream: object, heartbeat: scheduler_pb2.Heartbeat, now: float) -> bool:
        """A heartbeat has come. False if a newer stream of this worker has taken over."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.stream is not stream:
            return False
        worker.heartbeat, worker.seen_at = heartbeat, now
        self._note_served(worker, now)
        self._note_state(worker, heartbeat, now)
        return True

    def detach(self, worker_id: str, stream: object) -> bool:
        """Its stream has ended. False if a newer one has taken over, so that nothing is lost."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.stream is not stream:
            return False
        worker.stream = None
        return True

    def usable(self, now: float) -> list[Worker]:
        """Workers that new work may go to, with no room in use as far as this module knows."""
        ready = [w.worker for w in self._workers.values() if not self._not_ready_reason(w, now)]
        return [self._suspended(worker) if self._gate.is_closed(worker.worker_id, now) else worker for worker in ready]

    def known(self, now: float) -> list[Worker]:
        """Every worker seen in the last minute, ready or not."""
        self._forget(now)
        return [w.worker for w in self._workers.values()]

    def named(self, name: str, now: float) -> list[str]:
        """Ids of the workers that have this id, or this node's."""
        self._forget(now)
        registrations = [worker.registration for worker in self._workers.values()]
        return sorted(r.worker_id for r in registrations if name in (r.worker_id, r.node_id))

    def registration(self, worker_id: str) -> scheduler_pb2.Register | None:
        """As the worker introduced itself; None: it isn't known."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.registration

    def _not_ready_reason(self, worker: Attached, now: float) -> str:
        reason = worker.not_ready_reason(now, self._liveness_seconds)
        return reason or ("drained by an operator" if self._drained(worker.registration) else "")

    def served_at(self, ticket: Ticket, now: float) -> float | None:
        """When a ready worker was last seen that serves this ticket's model: now, if one is here. None if never."""
        if any(serves(worker, ticket) for worker in self.usable(now)):
            return now
        return max((at for (model, version), at in self._last_served.items() if _names(ticket, model, version)), default=None)

    def note_served(self, model: str, version: str, at: float) -> None:
        """Another scheduler has seen it served."""
        self._last_served[model, version] = max(at, self._last_served.get((model, version), at))

    def states(self, now: float) -> list[admin_pb2.WorkerState]:
        """For operators, by worker id."""
        self._forget(now)
        return [self._as_state(self._workers[worker_id], now) for worker_id in sorted(self._workers)]

    def ready_by_model(self, now: float) -> dict[str, int]:
        """Ready workers of every model seen, zeros included."""
        counts = {model: 0 for model, _ in self._last_served}
        for worker in self.usable(now):
            for model in worker.models:
                counts[model] = counts.get(model, 0) + 1
        return counts

    def heartbeat_ages(self, now: float) -> dict[str, float]:
        """Seconds since the last word of each worker that is attached."""
        return {worker_id: now - worker.seen_at for worker_id, worker in self._workers.items() if worker.stream is not None}

    def _note_served(self, worker: Attached, now: float) -> None:
        if self._not_ready_reason(worker, now):
            return
        for model in _loaded(worker.registration):
            self.note_served(model.model, model.version, now)

    def _note_state(self, worker: Attached, heartbeat: scheduler_pb2.Heartbeat, now: float) -> None:
        node = node_state(worker.registration, heartbeat)
        worker.worker = replace(worker.worker, node=node)
        registration, celsius = worker.registration, node.temperature_celsius
        block_size = max((model.block_size for model in registration.models), default=0)
        rate = prefill_rate(node, heartbeat.num_running, heartbeat.num_used_blocks * block_size)
        listed = {lease.request_id for lease in heartbeat.leases}
        self._backlog.told(registration.incarnation, heartbeat.num_prefill_tokens, rate, listed, now)
        self._gate.note(registration.worker_id, now, healthy=heartbeat.healthy, celsius=celsius, slowdown_celsius=node.slowdown_celsius)

    def _suspended(self, worker: Worker) -> Worker:
        return replace(worker, node=replace(worker.node, suspended=True))

    def _forget(self, now: float) -> None:
        for worker_id, worker in list(self._workers.items()):
            if worker.stream is None and now - worker.seen_at > FORGET_SECONDS:
                del self._workers[worker_id]
        self._gate.keep(self._workers)

    def _as_state(self, worker: Attached, now: float) -> admin_pb2.WorkerState:
        reason = self._not_ready_reason(worker, now)
        return admin_pb2.WorkerState(
            registration=worker.registration,
            heartbeat=worker.heartbeat,
            heartbeat_age_seconds=now - worker.seen_at,
            ready=not reason,
            not_ready_reason=reason,
        )


def _loaded(registration: scheduler_pb2.Register) -> Iterable[scheduler_pb2.WorkerModel]:
    return [model for model in registration.models if model.loaded]


def as_worker(r: scheduler_pb2.Register) -> Worker:
    """The policy's view of a worker with nothing in use."""
    models = {m.model: ServedModel(m.version, m.block_size, m.num_blocks, m.max_call_tokens or m.max_model_len) for m in _loaded(r)}
    node = node_state(r, scheduler_pb2.Heartbeat())
    return Worker(r.worker_id, r.incarnation, r.address, r.max_sequences, r.max_sequences + r.max_waiting, models, node=node)


def node_state(r: scheduler_pb2.Register, heartbeat: scheduler_pb2.Heartbeat) -> NodeState:
    """What a heartbeat says beyond leases. Workers of before tell less: their step time is unknown."""
    step, total = heartbeat.step_time, heartbeat.memory_total_bytes
    return NodeState(
        StepCost(step.fixed_seconds, step.token_seconds, step.row_seconds, step.key_seconds) if heartbeat.HasField("step_time") else None,
        r.max_step_tokens or NodeState().max_step_tokens,
        heartbeat.utilization,
        1 - heartbeat.memory_used_bytes / total if total else 1.0,
        heartbeat.num_waiting,
        heartbeat.temperature_celsius if heartbeat.HasField("temperature_celsius") else None,
        heartbeat.celsius_per_second if heartbeat.HasField("celsius_per_second") else None,
        r.capacity.slowdown_celsius if r.capacity.HasField("slowdown_celsius") else SLOWDOWN_CELSIUS,
        r.region,
        absent=_absent(heartbeat),
    )


def _absent(heartbeat: scheduler_pb2.Heartbeat) -> dict[str, float]:
    """Models whose weights aren't on the device, with the seconds that bringing them takes."""
    return {state.model: seconds_to_load(state) for state in heartbeat.models if state.place != scheduler_pb2.MODEL_PLACE_DEVICE}


def seconds_to_load(state: scheduler_pb2.ModelState) -> float:
    """What bringing a model to the device takes, as its worker has measured it, or as it is taken for before that."""
    if state.place == scheduler_pb2.MODEL_PLACE_COLD:
        return NEVER_SECONDS
    return state.load_seconds if state.HasField("load_seconds") else state.num_bytes / UNMEASURED_BYTES_PER_SECOND


def _names(ticket: Ticket, model: str, version: str) -> bool:
    return model == ticket.model and ticket.model_version in ("", version)
