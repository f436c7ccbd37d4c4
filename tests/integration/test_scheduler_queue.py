"""The queue over gRPC: who is shed and what it is told, whose turn it is, and what no scheduler places any more."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError
from services.policy.watched import PolicyFile
from services.scheduler import keys
from tests.scheduler_harness import RunningScheduler, failure_of, fake_worker, lease_of, queue_is, running_scheduler, until, wire_ticket


def _sample(scheduler: RunningScheduler, name: str, **labels: str) -> float:
    return scheduler.scheduler.metrics.registry.get_sample_value(name, {"model": "tiny@fp32", **labels}) or 0.0


async def _wait(scheduler: RunningScheduler, depth: int, **fields: Any) -> "asyncio.Task[StatusError]":
    """A ticket that waits, and what ends its wait. Returns when it is the last of so many."""
    call = asyncio.create_task(failure_of(scheduler.place(wire_ticket(**fields))))
    await until(lambda: queue_is(scheduler, depth))
    return call


async def test_a_full_queue_sheds_batch_at_whichever_scheduler_it_waits(redis_server) -> None:
    """Case F25: told at once, with a time to come back."""
    async with (
        running_scheduler(redis_server.url, "s1", max_queued=3, no_worker_seconds=60) as s1,
        running_scheduler(redis_server.url, "s2", max_queued=3, no_worker_seconds=60) as s2,
    ):
        older = await _wait(s1, 1, request_id="older", latency_class=3)
        newest = await _wait(s2, 2, request_id="newest", latency_class=3)
        await _wait(s1, 3, latency_class=2)
        refused = await failure_of(s1.place(wire_ticket(latency_class=3)))
        assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "QUEUE_FULL")
        assert refused.retry_after_seconds
        realtime = asyncio.create_task(failure_of(s1.place(wire_ticket("now", latency_class=1))))
        shed = await newest
        assert (shed.code, shed.reason) == (Code.UNAVAILABLE, "SHED")
        assert shed.retry_after_seconds
        assert "3 requests wait for tiny@fp32" in shed.message
        assert "batch" in shed.message
        await until(lambda: "now" in s1.scheduler.waiting._waiters)
        assert await queue_is(s1, 3)
        assert not older.done()
        assert not realtime.done()
        assert (_sample(s1, "forebay_shed_total", latency_class="batch"), _sample(s2, "forebay_shed_total", latency_class="batch")) == (
            1,
            1,
        )
        realtime.cancel()
        older.cancel()


async def test_what_waits_is_counted_once_over_all_schedulers_under_vllms_name(redis_server) -> None:
    """KEDA's trigger sums vllm:num_requests_waiting, and requests wait here, not at workers."""

    def waiting(scheduler: RunningScheduler) -> float | None:
        labels = {"model_name": "tiny@fp32", "engine": "queue"}
        return scheduler.scheduler.metrics.registry.get_sample_value("vllm:num_requests_waiting", labels)

    async with (
        running_scheduler(redis_server.url, "s1", no_worker_seconds=60) as s1,
        running_scheduler(redis_server.url, "s2", no_worker_seconds=60) as s2,
    ):
        assert waiting(s1) is None
        calls = [asyncio.create_task(lease_of(scheduler.place(wire_ticket()))) for scheduler in (s1, s1, s2)]
        await until(lambda: queue_is(s1, 3))
        assert (waiting(s1), waiting(s2)) == (2, 1)
        async with fake_worker(s1, s2):
            await asyncio.gather(*calls)
            await until(lambda: (waiting(s1), waiting(s2)) == (0, 0))


async def test_a_stream_hears_that_it_was_shed_even_if_the_event_was_lost(redis_server) -> None:
    async with running_scheduler(redis_server.url, max_queued=1, no_worker_seconds=60) as scheduler:
        batch = await _wait(scheduler, 1, latency_class=3)
        scheduler.scheduler.keeper.shed = lambda *_: None  # type: ignore[method-assign]
        realtime = asyncio.create_task(failure_of(scheduler.place(wire_ticket(latency_class=1))))
        assert (await batch).reason == "SHED"
        assert not realtime.done()
        realtime.cancel()


async def test_a_storm_of_retries_meets_one_answer_each_and_the_queue_stays_as_it_is(redis_server) -> None:
    """Case F24, the scheduler's side: a refusal leaves no trace, a retry under its own id takes no second place."""
    async with running_scheduler(redis_server.url, max_queued=4, no_worker_seconds=60) as scheduler:
        waiting = [await _wait(scheduler, depth, latency_class=2) for depth in range(1, 5)]
        errors = await asyncio.gather(*(failure_of(scheduler.place(wire_ticket(f"r{i % 20}", latency_class=3))) for i in range(200)))
        assert {error.code for error in errors} <= {Code.UNAVAILABLE, Code.ABORTED}
        hints = [error.retry_after_seconds for error in errors if error.reason == "QUEUE_FULL"]
        assert len({round(hint, 2) for hint in hints if hint}) > 10, "they come back one by one"
        assert await queue_is(scheduler, 4)
        assert len(scheduler.scheduler.waiting) == 4
        held = await scheduler.store.commands(["ZCARD", keys.HELD], ["ZCARD", keys.DEADLINES])
        assert held == [4, 4]
        for call in waiting:
            call.cancel()


async def test_a_deadline_passes_in_the_queue_although_its_scheduler_has_died(redis_server) -> None:
    async with (
        running_scheduler(redis_server.url, "s1", no_worker_seconds=60) as s1,
        running_scheduler(redis_server.url, "s2", no_worker_seconds=60) as s2,
    ):
        ticket = wire_ticket("late", latency_class=3)
        lost = asyncio.create_task(failure_of(s1.place(ticket)))
        await until(lambda: queue_is(s2, 1))
        await s1.kill()
        await lost
        await s2.store.commands(["HSET", keys.ticket("late"), "deadline", 1], ["ZADD", keys.DEADLINES, 1, "late"])
        await until(lambda: _sample(s2, "forebay_finished_total", latency_class="batch", reason="deadline") == 1)
        assert await queue_is(s2, 0)
        async with fake_worker(s2) as worker:
            error = await failure_of(s2.place(ticket))
            assert error.code is Code.DEADLINE_EXCEEDED
            assert worker.leases == {}
        assert _sample(s2, "forebay_placements_total", latency_class="batch") == 0


async def test_two_schedulers_share_the_turns_of_two_orgs(redis_server) -> None:
    """A flood that came first, at one scheduler, takes no more than its half while another org waits at the other."""
    async with (
        running_scheduler(redis_server.url, "s1") as s1,
        running_scheduler(redis_server.url, "s2") as s2,
        fake_worker(s1, s2, slots=1, num_blocks=1000) as worker,
    ):
        order: list[str] = []

        async def run(scheduler: RunningScheduler, org: str) -> None:
            lease = await lease_of(scheduler.place(wire_ticket(org=org)))
            order.append(org)
            worker.accept(lease)
            await asyncio.sleep(0)
            worker.leases.pop(lease.request_id)
            usage = types_pb2.Usage(prompt_tokens=16, completion_tokens=16)
            await scheduler.stub.Finish(
                scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, usage=usage, finish_reason=1)
            )

        blockers = [await lease_of(s1.place(wire_ticket(f"blocker{i}", org="z"))) for i in range(3)]
        for lease in blockers:
            worker.accept(lease)
        flood = [asyncio.create_task(run(s1, "flood")) for _ in range(60)]
        await until(lambda: queue_is(s1, 60))
        small = [asyncio.create_task(run(s2, "small")) for _ in range(20)]
        await until(lambda: queue_is(s1, 80))
        for lease in blockers:
            worker.leases.pop(lease.request_id)
            await s1.stub.Finish(scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=1, finish_reason=1))
        await asyncio.gather(*flood, *small)
        first = Counter(order[:30])
        assert abs(first["flood"] - first["small"]) <= 6, "as many as run at once may differ"


@pytest.mark.parametrize("how", ["share", "weight"])
async def test_the_policy_file_rules_shares_and_weights(redis_server, tmp_path, how: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("orgs:\n  small: {kv_share: 0.25}\n  big: {weight: 3}\n")
    policy = PolicyFile(path)
    async with running_scheduler(redis_server.url, policy=policy) as scheduler, fake_worker(scheduler, slots=8, num_blocks=64) as worker:
        if how == "share":
            error = await failure_of(scheduler.place(wire_ticket(org="small", num_prompt_tokens=250, max_tokens=7)))
            assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "max_tokens")
            worker.accept(await lease_of(scheduler.place(wire_ticket(org="small", num_prompt_tokens=200, max_tokens=7))), 13)
            waits = await _wait(scheduler, 1, org="small", num_prompt_tokens=200, max_tokens=7)
            worker.accept(await lease_of(scheduler.place(wire_ticket(org="other", num_prompt_tokens=200, max_tokens=7))), 13)
            assert not waits.done()
            waits.cancel()
        else:
            for org in ("big", "other"):
                await lease_of(scheduler.place(wire_ticket(org=org, num_prompt_tokens=60, max_tokens=0)))
            line = keys.line_name("tiny@fp32", 2)
            (counts,) = await scheduler.store.commands(["ZRANGE", f"{keys.PREFIX}spent:{line}", 0, -1, "WITHSCORES"])
            assert [float(count) for count in counts[1::2]] == [20, 80], "the second was lifted to where the line had come"


async def test_depths_by_class_stay_right_when_tickets_are_shed(redis_server) -> None:
    async with running_scheduler(redis_server.url, max_queued=4, no_worker_seconds=60) as scheduler:
        calls = [await _wait(scheduler, depth, latency_class=latency_class) for depth, latency_class in enumerate((3, 3, 3, 2), 1)]
        calls += [asyncio.create_task(failure_of(scheduler.place(wire_ticket(latency_class=1)))) for _ in range(2)]

        async def told() -> bool:
            fleet = await scheduler.admin.GetFleet(admin_pb2.GetFleetRequest())
            return [(queue.latency_class, queue.num_waiting) for queue in fleet.queues] == [(1, 2), (2, 1), (3, 1)]

        await until(told)
        for call in calls:
            call.cancel()
