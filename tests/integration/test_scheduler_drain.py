"""Drain: by worker or node, heard by every scheduler and by the worker, over restarts; written down, and refused by name."""

from typing import Any

import grpc
import pytest

from forebay.v1 import admin_pb2
from services.common.errors import Code, from_rpc
from tests.scheduler_harness import FakeWorker, RunningScheduler, fake_worker, lease_of, running_scheduler, until, wire_ticket


def _drain(scheduler: RunningScheduler, name: str, *, undrain: bool = False) -> Any:
    return scheduler.admin.Drain(admin_pb2.DrainRequest(name=name, undrain=undrain, actor="ops/jane"))


async def _states(scheduler: RunningScheduler) -> dict[str, str]:
    fleet = await scheduler.admin.GetFleet(admin_pb2.GetFleetRequest())
    return {worker.registration.worker_id: worker.not_ready_reason for worker in fleet.workers}


async def _told(worker: FakeWorker, *, drained: bool) -> None:
    await until(lambda: worker.state.drained == drained)


async def test_a_drained_worker_is_told_and_gets_nothing_new(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url, "s1") as one,
        running_scheduler(redis_server.url, "s2") as two,
        fake_worker(one, two, worker_id="w1", slots=50) as w1,
        fake_worker(one, two, worker_id="w2", slots=50) as w2,
    ):
        assert (await _drain(one, "w1")).worker_ids == ["w1"]
        assert (await _states(one))["w1"] == "drained by an operator"
        await _told(w1, drained=True)

        async def seen() -> bool:
            return bool((await _states(two))["w1"])

        await until(seen)
        leases = [await lease_of((one, two)[i % 2].place(wire_ticket())) for i in range(6)]
        assert {lease.worker_id for lease in leases} == {"w2"}
        await _drain(two, "w1", undrain=True)
        await _told(w1, drained=False)
        assert not w2.state.drained
        audit = (await one.admin.ListAudit(admin_pb2.ListAuditRequest())).entries
        assert [(act.actor, act.act, act.target) for act in audit] == [("ops/jane", "Undrain", "w1"), ("ops/jane", "Drain", "w1")]


async def test_a_node_is_all_its_workers_and_stays_drained_over_restarts(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url) as scheduler,
        fake_worker(scheduler, worker_id="w1", node_id="host") as w1,
        fake_worker(scheduler, worker_id="w2", node_id="host"),
    ):
        assert (await _drain(scheduler, "host")).worker_ids == ["w1", "w2"]
        await _told(w1, drained=True)
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler, incarnation="i2", node_id="host") as again:
        await until(lambda: again.num_registered == 1)
        await _told(again, drained=True)
        assert (await _states(scheduler))["w1"]
        assert (await _drain(scheduler, "host", undrain=True)).worker_ids == ["w1"]
        await _told(again, drained=False)


@pytest.mark.parametrize(("undrain", "words"), [(False, "there is no worker and no node nobody"), (True, "nobody isn't drained")])
async def test_an_unknown_name_is_refused_and_that_is_written_down(redis_server, undrain: bool, words: str) -> None:
    async with running_scheduler(redis_server.url) as scheduler, fake_worker(scheduler):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _drain(scheduler, "nobody", undrain=undrain)
        error = from_rpc(caught.value)
        assert error.code is Code.NOT_FOUND
        assert words in error.message
        [entry] = (await scheduler.admin.ListAudit(admin_pb2.ListAuditRequest())).entries
        assert entry.outcome == "NOT_FOUND"
