"""Who is attached, and why new work does or doesn't go there."""

from dataclasses import replace

import pytest

from forebay.v1 import scheduler_pb2
from services.common.errors import StatusError
from services.policy.org import OrgPolicy
from services.scheduler.attachment import check_registration
from services.scheduler.policy.backlog import Backlog
from services.scheduler.policy.fleet import Worker, could_hold, needs, room
from services.scheduler.policy.node import StepCost
from services.scheduler.policy.order import Ticket
from services.scheduler.registry import FORGET_SECONDS, NEVER_SECONDS, UNMEASURED_BYTES_PER_SECOND, Registry, node_state

STREAM = object()


def _register(worker_id: str = "w1", *, loaded: bool = True, version: str = "v1") -> scheduler_pb2.Register:
    model = scheduler_pb2.WorkerModel(model="tiny@fp32", version=version, block_size=16, num_blocks=64, max_model_len=1024, loaded=loaded)
    return scheduler_pb2.Register(worker_id=worker_id, incarnation="i1", address="host:1", max_sequences=4, max_waiting=2, models=[model])


def _registry() -> Registry:
    return Registry(liveness_seconds=3.0)


def _ticket(version: str = "v1") -> Ticket:
    return Ticket("r", "org", 2, "tiny@fp32", version, 1, 1)


def _reason(registry: Registry, now: float) -> str:
    (state,) = registry.states(now)
    assert state.ready == (state.not_ready_reason == "") == bool(registry.usable(now))
    return state.not_ready_reason


def test_a_registered_worker_is_usable_with_some_room_for_waiting() -> None:
    registry = _registry()
    registry.attach(_register(), object(), now=0.0)
    (worker,) = registry.usable(1.0)
    assert (worker.worker_id, worker.max_sequences, worker.max_slots, worker.models["tiny@fp32"].num_blocks) == ("w1", 4, 6, 64)


@pytest.mark.parametrize(
    ("heartbeat", "words"),
    [
        ({"healthy": True}, ""),
        ({"healthy": False}, "makes no progress"),
        ({"healthy": True, "draining": True}, "draining"),
    ],
)
def test_the_last_heartbeat_decides(heartbeat: dict[str, bool], words: str) -> None:
    registry, stream = _registry(), object()
    registry.attach(_register(), stream, now=0.0)
    assert registry.beat("w1", stream, scheduler_pb2.Heartbeat(**heartbeat), now=1.0)
    assert words in _reason(registry, 1.0)
    assert bool(_reason(registry, 1.0)) == bool(words)


def test_silence_loading_and_a_lost_stream_are_reasons() -> None:
    registry, stream = _registry(), object()
    registry.attach(_register(loaded=False), stream, now=0.0)
    assert _reason(registry, 0.0) == "no model is loaded yet"
    registry.attach(_register(), stream, now=1.0)
    assert _reason(registry, 4.0) == ""
    assert _reason(registry, 4.1) == "no heartbeat for 3.1 s"
    assert registry.detach("w1", stream)
    assert "stream ended" in _reason(registry, 5.0)
    assert registry.known(5.0), "it still counts when judging what could ever fit"
    assert registry.known(2.0 + FORGET_SECONDS) == []


def test_an_older_stream_of_a_worker_has_no_say() -> None:
    registry, old, new = _registry(), object(), object()
    registry.attach(_register(), old, now=0.0)
    registry.attach(_register(), new, now=1.0)
    assert not registry.beat("w1", old, scheduler_pb2.Heartbeat(healthy=False), now=2.0)
    assert not registry.detach("w1", old)
    assert _reason(registry, 2.0) == ""


def test_when_a_model_was_served_last() -> None:
    registry, stream = _registry(), object()
    assert registry.served_at(_ticket(), 0.5) is None
    registry.attach(_register(), stream, now=1.0)
    assert registry.served_at(_ticket(), 1.5) == 1.5, "it is ready still"
    registry.beat("w1", stream, scheduler_pb2.Heartbeat(healthy=False), now=2.0)
    assert registry.served_at(_ticket(), 3.0) == 1.0
    assert registry.served_at(_ticket(""), 3.0) == 1.0
    assert registry.served_at(_ticket("v2"), 3.0) is None
    registry.note_served("tiny@fp32", "v2", 5.0)
    registry.note_served("tiny@fp32", "v2", 4.0)
    assert registry.served_at(_ticket("v2"), 6.0) == 5.0
    assert registry.ready_by_model(2.0) == {"tiny@fp32": 0}


def test_only_attached_workers_have_a_heartbeats_age() -> None:
    registry, lost, alive = _registry(), object(), object()
    registry.attach(_register("w1"), lost, now=0.0)
    registry.attach(_register("w2"), alive, now=0.0)
    registry.beat("w2", alive, scheduler_pb2.Heartbeat(healthy=True), now=2.0)
    assert registry.heartbeat_ages(2.5) == {"w1": 2.5, "w2": 0.5}
    registry.detach("w1", lost)
    assert registry.heartbeat_ages(2.5) == {"w2": 0.5}


def _beat(registry: Registry, now: float, **fields: object) -> Worker:
    assert registry.beat("w1", STREAM, scheduler_pb2.Heartbeat(**{"healthy": True, **fields}), now)
    (worker,) = registry.usable(now)
    return worker


def test_heartbeats_tell_the_policy_how_fast_and_how_warm_a_worker_is() -> None:
    registry, registration = _registry(), _register()
    registration.max_step_tokens, registration.region = 2048, "eu"
    registration.capacity.slowdown_celsius = 90.0
    registry.attach(registration, STREAM, 0.0)
    cold = _beat(registry, 0.5).node
    assert (cold.step, cold.temperature_celsius, cold.max_step_tokens, cold.region, cold.slowdown_celsius) == (None, None, 2048, "eu", 90.0)
    step = scheduler_pb2.StepTimeModel(fixed_seconds=0.01, token_seconds=0.001)
    told = _beat(
        registry, 1.0, step_time=step, temperature_celsius=70.0, utilization=0.5, memory_used_bytes=3, memory_total_bytes=4, num_waiting=2
    ).node
    assert told.step == StepCost(0.01, 0.001, 0.0, 0.0)
    assert (told.temperature_celsius, told.utilization, told.memory_free, told.num_queued) == (70.0, 0.5, 0.25, 2)


def test_what_a_heartbeat_has_still_to_compute_is_the_backlog() -> None:
    backlog = Backlog()
    registry = Registry(liveness_seconds=3.0, backlog=backlog)
    registration = _register()
    registry.attach(registration, STREAM, 0.0)
    backlog.sent(registration.incarnation, "known", 100, 0.0)
    backlog.sent(registration.incarnation, "under way", 10, 0.0)
    _beat(registry, 0.5, num_prefill_tokens=70, leases=[scheduler_pb2.LeaseProgress(request_id="known", epoch=1)])
    assert backlog.tokens(registration.incarnation, 0.5) == 80


def test_a_worker_that_was_in_trouble_is_usable_and_suspended_for_a_while() -> None:
    registry = _registry()
    registry.attach(_register(), STREAM, 0.0)
    assert registry.beat("w1", STREAM, scheduler_pb2.Heartbeat(healthy=False), 1.0)
    assert registry.usable(1.0) == []
    assert [_beat(registry, now).node.suspended for now in (2.0, 3.0, 4.5)] == [True, True, False]


def _beside_vectors(num_blocks: int = 1 << 20) -> scheduler_pb2.Register:
    """A worker with a chat model and one that embeds."""
    registration = _register()
    registration.models.add(
        model="vectors@fp32", version="v1", block_size=8192, num_blocks=num_blocks, max_model_len=256, max_call_tokens=8192, loaded=True
    )
    return registration


def test_a_call_for_vectors_may_bring_more_than_one_input_and_finds_room_beside_a_full_cache() -> None:
    registry = _registry()
    registry.attach(_beside_vectors(), object(), now=0.0)
    (worker,) = registry.usable(1.0)
    org, ticket = OrgPolicy("org"), replace(_ticket(), model="vectors@fp32", num_prompt_tokens=8192, max_tokens=0)
    assert could_hold(worker, ticket, org)
    assert not could_hold(worker, replace(ticket, num_prompt_tokens=8193), org)
    full = replace(worker, used_blocks=(0, 64, 0, 0))
    free_slots, free_blocks = room(full, full.models["vectors@fp32"], 2, preemptible=True)
    slots, blocks = needs(ticket, full, full.models["vectors@fp32"], org, 256)
    assert slots <= free_slots
    assert blocks <= free_blocks


def test_a_registration_whose_cache_holds_no_call_is_refused() -> None:
    check_registration(_beside_vectors(num_blocks=1))
    registration = _beside_vectors(num_blocks=1)
    registration.models[1].max_call_tokens = 8193
    with pytest.raises(StatusError, match="its longest request is of 8193 tokens"):
        check_registration(registration)


def test_models_whose_weights_are_elsewhere_are_told_with_the_seconds_that_they_take() -> None:
    heartbeat = scheduler_pb2.Heartbeat(
        models=[
            scheduler_pb2.ModelState(model="here", place=scheduler_pb2.MODEL_PLACE_DEVICE, load_seconds=3),
            scheduler_pb2.ModelState(model="measured", place=scheduler_pb2.MODEL_PLACE_HOST, load_seconds=1.5, num_bytes=1),
            scheduler_pb2.ModelState(model="coming", place=scheduler_pb2.MODEL_PLACE_LOADING, load_seconds=0.2),
            scheduler_pb2.ModelState(
                model="unmeasured", place=scheduler_pb2.MODEL_PLACE_HOST, num_bytes=int(2 * UNMEASURED_BYTES_PER_SECOND)
            ),
            scheduler_pb2.ModelState(model="broken", place=scheduler_pb2.MODEL_PLACE_COLD, failure="the file is damaged"),
        ]
    )
    absent = node_state(scheduler_pb2.Register(), heartbeat).absent
    assert absent == {"measured": 1.5, "coming": 0.2, "unmeasured": 2.0, "broken": NEVER_SECONDS}
