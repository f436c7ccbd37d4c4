"""Operators' acts on models: workers hear and answer, pins last and are shared, refusals say why, and all is written down."""

from typing import Any

import grpc
import pytest

from forebay.v1 import admin_pb2, scheduler_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.scheduler import model_acts
from tests.scheduler_harness import MODEL, RunningScheduler, fake_worker, running_scheduler, until

LOAD, UNLOAD = scheduler_pb2.MODEL_ACT_KIND_LOAD, scheduler_pb2.MODEL_ACT_KIND_UNLOAD
PIN, UNPIN = scheduler_pb2.MODEL_ACT_KIND_PIN, scheduler_pb2.MODEL_ACT_KIND_UNPIN


async def _set(scheduler: RunningScheduler, act: Any, model: str = MODEL, worker: str = "") -> list[tuple[str, bool, str]]:
    request = admin_pb2.SetModelRequest(model=model, act=act, worker=worker, actor="ops/jane")
    answer = await scheduler.admin.SetModel(request)
    return [(outcome.worker_id, outcome.refused, outcome.words) for outcome in answer.outcomes]


async def _refused(scheduler: RunningScheduler, act: Any, model: str = MODEL, worker: str = "") -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _set(scheduler, act, model, worker)
    return from_rpc(caught.value)


async def test_those_that_are_named_hear_and_answer(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url) as scheduler,
        fake_worker(scheduler, worker_id="w1", node_id="host") as w1,
        fake_worker(scheduler, worker_id="w2", node_id="host") as w2,
        fake_worker(scheduler, worker_id="w3") as w3,
    ):
        assert await _set(scheduler, LOAD, worker="w1") == [("w1", False, "does as it is told")]
        assert [outcome[0] for outcome in await _set(scheduler, UNLOAD, worker="host")] == ["w1", "w2"]
        assert len(await _set(scheduler, LOAD)) == 3
        assert w1.model_acts == [(LOAD, MODEL), (UNLOAD, MODEL), (LOAD, MODEL)]
        assert (w2.model_acts, w3.model_acts) == ([(UNLOAD, MODEL), (LOAD, MODEL)], [(LOAD, MODEL)])
        audit = (await scheduler.admin.ListAudit(admin_pb2.ListAuditRequest())).entries
        assert [(act.actor, act.act, act.target, act.outcome) for act in audit][:2] == [
            ("ops/jane", "LoadModel", MODEL, "OK"),
            ("ops/jane", "UnloadModel", MODEL, "OK"),
        ]


async def test_a_name_without_its_level_is_enough(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler) as worker:
        await _set(scheduler, LOAD, model=MODEL.partition("@")[0])
        assert worker.model_acts == [(LOAD, MODEL)]
        worker.register.models.add(model="tiny@int8", version="v1", block_size=16, num_blocks=64, loaded=True, max_model_len=64)
        await worker.detach()
        await worker.attach(scheduler)
        error = await _refused(scheduler, LOAD, model="tiny")
        assert (error.code, error.message) == (Code.INVALID_ARGUMENT, "tiny is served as tiny@fp32 and tiny@int8: say which")


async def test_a_pin_lasts_over_restarts_and_is_taken_back(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url, "s1") as one,
        running_scheduler(redis_server.url, "s2") as two,
        fake_worker(one, two, worker_id="w1") as w1,
        fake_worker(two, worker_id="w2") as w2,
    ):
        for _ in range(2):
            await _set(one, PIN)
        await until(lambda: list(w1.state.pins) == [MODEL])
        await until(lambda: list(w2.state.pins) == [MODEL])  # the other scheduler has heard
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler, worker_id="w9") as again:
        await until(lambda: list(again.state.pins) == [MODEL])
        for _ in range(2):
            await _set(scheduler, UNPIN)
        await until(lambda: not again.state.pins)


async def test_a_pin_of_one_worker_is_its_own(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url) as scheduler,
        fake_worker(scheduler, worker_id="w1") as w1,
        fake_worker(scheduler, worker_id="w2") as w2,
    ):
        await _set(scheduler, PIN, worker="w1")
        await until(lambda: list(w1.state.pins) == [MODEL])
        assert not w2.state.pins
        await _set(scheduler, PIN)
        await until(lambda: list(w2.state.pins) == [MODEL])
        error = await _refused(scheduler, UNPIN, worker="w2")
        assert error.code is Code.FAILED_PRECONDITION
        assert "pinned on all workers" in error.message
        await _set(scheduler, UNPIN)
        await until(lambda: not w1.state.pins and not w2.state.pins)


async def test_what_no_worker_does_is_refused_with_the_reasons_and_pins_nothing(redis_server) -> None:
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler, worker_id="w1") as w1:
        w1.refuses, w1.says = True, "is too large"
        error = await _refused(scheduler, PIN)
        assert (error.code, error.message) == (Code.FAILED_PRECONDITION, f"{MODEL}: on w1 it is too large")
        async with fake_worker(scheduler, worker_id="w2") as w2:
            outcomes = await _set(scheduler, PIN)
            assert outcomes == [("w1", True, "is too large"), ("w2", False, "does as it is told")]
            await until(lambda: list(w2.state.pins) == [MODEL])
        audit = (await scheduler.admin.ListAudit(admin_pb2.ListAuditRequest())).entries
        assert [act.outcome for act in audit] == ["OK", "FAILED_PRECONDITION"]


@pytest.mark.parametrize(
    ("act", "model", "worker", "code", "words"),
    [
        (LOAD, "nothing@fp32", "", Code.NOT_FOUND, "no worker serves nothing@fp32"),
        (PIN, MODEL, "nobody", Code.NOT_FOUND, "there is no worker and no node nobody"),
        (PIN, MODEL, "bare", Code.NOT_FOUND, f"{MODEL} isn't served by bare"),
        (0, MODEL, "", Code.INVALID_ARGUMENT, "act is 0"),
    ],
)
async def test_what_makes_no_sense_is_refused(redis_server, act: Any, model: str, worker: str, code: Code, words: str) -> None:
    async with (
        running_scheduler(redis_server.url) as scheduler,
        fake_worker(scheduler, worker_id="w1"),
        fake_worker(scheduler, worker_id="bare") as bare,
    ):
        del bare.register.models[:]
        await bare.detach()
        await bare.attach(scheduler)
        error = await _refused(scheduler, act, model, worker)
        assert error.code is code
        assert words in error.message


async def test_a_worker_that_says_nothing_is_no_success(redis_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_acts, "ANSWER_SECONDS", 0.1)
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler) as worker:
        worker.says = None
        error = await _refused(scheduler, LOAD)
        assert "the worker said nothing" in error.message
