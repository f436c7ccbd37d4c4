"""A scheduler with a policy file: who may ask for what, what is left of it, and what a class was promised."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from forebay.v1 import scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.common.settings import SettingsError
from services.policy.watched import PolicyFile
from services.scheduler.__main__ import open_policy
from services.scheduler.settings import SchedulerSettings
from tests.conftest import RedisServer
from tests.scheduler_harness import RunningScheduler, failure_of, fake_worker, lease_of, queue_is, running_scheduler, until, wire_ticket

POLICY = """\
tiers:
  free:
    {requests_per_minute: 1, requests_burst: 2, tokens_per_minute: 1, tokens_burst: 100, max_concurrent: 2,
     ceiling_class: standard, models: ["tiny*"]}
  gold: {}
  tight: {max_concurrent: 1}
default_tier: free
orgs:
  gold: {tier: gold}
  tight: {tier: tight}
classes:
  standard: {ttft_target_ms: 1500, tpot_target_ms: 100, deadline_seconds: 0.2}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


class Clock:
    """Seconds that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def scheduler(redis_server, path: Path, clock: Clock) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(redis_server.url, policy=PolicyFile(path, clock)) as running:
        yield running


def _quota_of(error: StatusError) -> tuple[list[str], types_pb2.QuotaState | None]:
    failure, state = error_details_pb2.QuotaFailure(), types_pb2.QuotaState()
    assert error.details[0].Unpack(failure)
    known = len(error.details) > 1 and error.details[1].Unpack(state)
    return [violation.description.partition(":")[0] for violation in failure.violations], state if known else None


async def _finish(scheduler: RunningScheduler, lease: scheduler_pb2.Lease, status_code: int = 0) -> bool:
    usage = types_pb2.Usage(prompt_tokens=16, completion_tokens=3)
    request = scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, usage=usage, status_code=status_code)
    return (await scheduler.stub.Finish(request)).ended


async def _error(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc(caught.value)


async def test_a_lease_says_what_is_left_and_what_its_class_was_promised(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler):
        lease = await lease_of(scheduler.place(wire_ticket("a")))
        assert (lease.ttft_target_seconds, lease.tpot_target_seconds) == (1.5, 0.1)
        assert lease.quota == types_pb2.QuotaState(
            requests_limit=2,
            requests_remaining=1,
            requests_reset_seconds=60,
            tokens_limit=100,
            tokens_remaining=68,
            tokens_reset_seconds=1920,
        )
        free = await lease_of(scheduler.place(wire_ticket("b", org="gold")))
        assert free.quota == types_pb2.QuotaState()


async def test_over_the_quota(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler):
        for request_id in ("a", "b"):
            await _finish(scheduler, await lease_of(scheduler.place(wire_ticket(request_id))))
        error = await failure_of(scheduler.place(wire_ticket("c", max_tokens=60)))
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        kinds, state = _quota_of(error)
        assert kinds == ["requests", "tokens"]
        assert state is not None
        assert (state.requests_limit, state.requests_remaining, state.tokens_limit) == (2, 0, 100)
        assert error.retry_after_seconds is not None
        assert 0 < error.retry_after_seconds <= 840
        words = (
            "acme has reached its limit on requests (1 per minute) and on tokens (1 per minute; 62 left, and this request reserves 76): try"
        )
        assert error.message.startswith(words)
        assert scheduler.scheduler.metrics.registry.get_sample_value("forebay_quota_refused_total", {"kind": "tokens"}) == 1


async def test_over_the_concurrency(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler):
        lease = await lease_of(scheduler.place(wire_ticket("a", org="tight")))
        error = await failure_of(scheduler.place(wire_ticket("b", org="tight")))
        assert (error.code, _quota_of(error)[0], error.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, ["concurrent"], 1.0)
        await _finish(scheduler, lease)
        assert (await lease_of(scheduler.place(wire_ticket("b", org="tight")))).epoch == 1


async def test_what_never_fits_is_refused_without_a_time_to_come_back(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler):
        error = await failure_of(scheduler.place(wire_ticket("a", n=3, max_tokens=29)))
        assert (error.code, error.reason, error.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE", None)
        assert "16 prompt tokens + 3 x max_tokens 29 is 103; acme may use at most 100 at once" in error.message
        assert _quota_of(error) == (["tokens"], None)
        assert (await lease_of(scheduler.place(wire_ticket("a", n=3, max_tokens=28)))).quota.tokens_remaining == 0


@pytest.mark.parametrize(
    ("status_code", "remaining"),
    [(0, 80), (Code.CANCELLED.value[0], 80), (Code.DEADLINE_EXCEEDED.value[0], 80), (Code.INTERNAL.value[0], 99)],
)
async def test_what_an_end_costs(scheduler: RunningScheduler, status_code: int, remaining: int) -> None:
    """A cancelled stream settles to what was delivered; our failures cost nothing. A token comes back each minute."""
    async with fake_worker(scheduler):
        await _finish(scheduler, await lease_of(scheduler.place(wire_ticket("a"))), status_code)
        lease = await lease_of(scheduler.place(wire_ticket("b", num_prompt_tokens=1, max_tokens=0)))
        assert lease.quota.tokens_remaining == remaining


async def test_a_model_that_is_not_the_orgs(scheduler: RunningScheduler) -> None:
    error = await failure_of(scheduler.place(wire_ticket("a", model="huge@int4")))
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "MODEL_NOT_ALLOWED")


async def test_a_class_above_the_ceiling_is_lowered_to_it_and_the_lease_says_so(scheduler: RunningScheduler) -> None:
    """A gateway may not know yet that the ceiling has come down."""
    async with fake_worker(scheduler):
        assert (await lease_of(scheduler.place(wire_ticket("a", latency_class=1)))).latency_class == 2
        assert (await lease_of(scheduler.place(wire_ticket("b", latency_class=3)))).latency_class == 3


async def test_the_prompts_of_a_request_are_reserved_together_or_not_at_all(scheduler: RunningScheduler) -> None:
    """32 of 100 tokens each, two requests at once: three don't fit, and take nothing from the two that do."""
    async with fake_worker(scheduler):
        reserve = scheduler.stub.Reserve
        three = [wire_ticket(request_id, max_tokens=10) for request_id in "abc"]
        error = await _error(reserve(scheduler_pb2.ReserveRequest(tickets=three)))
        assert (error.code, error.reason, error.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE", None)
        assert "each of the 3 prompts is a request; acme may begin at most 2 at once: send fewer prompts" in error.message
        two = [wire_ticket(request_id, max_tokens=34) for request_id in "de"]
        assert (await reserve(scheduler_pb2.ReserveRequest(tickets=two))).quota.tokens_remaining == 0
        error = await _error(reserve(scheduler_pb2.ReserveRequest(tickets=[wire_ticket("f", max_tokens=0)])))
        assert (error.reason, _quota_of(error)[0]) == ("QUOTA_EXCEEDED", ["requests", "tokens", "concurrent"])
        leases = [await lease_of(scheduler.place(ticket)) for ticket in two]
        assert [lease.quota.tokens_remaining for lease in leases] == [0, 0]
        for lease in leases:
            await _finish(scheduler, lease, Code.INTERNAL.value[0])
        assert (await lease_of(scheduler.place(wire_ticket("g", max_tokens=0)))).quota.tokens_remaining == 84


@pytest.mark.parametrize(
    "tickets", [[], [wire_ticket("a"), wire_ticket("a")], [wire_ticket("a"), wire_ticket("b", org="gold")], [wire_ticket("a", n=0)]]
)
async def test_what_can_be_no_request_reserves_nothing(scheduler: RunningScheduler, tickets: list[scheduler_pb2.Ticket]) -> None:
    error = await _error(scheduler.stub.Reserve(scheduler_pb2.ReserveRequest(tickets=tickets)))
    assert error.code is Code.INVALID_ARGUMENT


async def test_a_class_has_a_deadline_for_those_that_name_none(scheduler: RunningScheduler) -> None:
    async with fake_worker(scheduler, slots=1) as worker:
        for request_id in ("a", "b", "c"):
            worker.accept(await lease_of(scheduler.place(wire_ticket(request_id, org="gold"))))
        error = await failure_of(scheduler.place(wire_ticket("d", org="gold", deadline_seconds=0)))
        assert error.code is Code.DEADLINE_EXCEEDED
        await until(lambda: queue_is(scheduler, 0))


async def test_what_runs_goes_on_whatever_is_set(scheduler: RunningScheduler, path: Path, clock: Clock) -> None:
    async with fake_worker(scheduler) as worker:
        worker.accept(await lease_of(scheduler.place(wire_ticket("a", max_tokens=80))))
        _replace(path, POLICY.replace("tokens_burst: 100", "tokens_burst: 10").replace("tiny", "other"))
        _look_twice(scheduler, clock)
        assert scheduler.scheduler.orgs.get("acme").tokens_burst == 10
        worker.leases.clear()
        moved = await lease_of(scheduler.place(wire_ticket("a", max_tokens=80), lost_epoch=1))
        assert moved.epoch == 2
        assert (await failure_of(scheduler.place(wire_ticket("b")))).code is Code.PERMISSION_DENIED


async def test_a_redis_that_forgot_everything_locks_nobody_out(scheduler: RunningScheduler, redis_server: RedisServer) -> None:
    async with fake_worker(scheduler) as worker:
        running = [await lease_of(scheduler.place(wire_ticket(request_id))) for request_id in ("a", "b")]
        for lease in running:
            worker.accept(lease)
        assert (await failure_of(scheduler.place(wire_ticket("c")))).code is Code.RESOURCE_EXHAUSTED
        redis_server.kill()
        redis_server.start()
        await until(lambda: _leases_are(scheduler, 2))
        assert (await lease_of(scheduler.place(wire_ticket("c")))).quota.requests_remaining == 1
        assert [await _finish(scheduler, lease) for lease in running] == [True, True]


async def _leases_are(scheduler: RunningScheduler, num: int) -> bool:
    try:
        return (await scheduler.scheduler.ledger.survey()).num_leases == num
    except StatusError:
        return False


async def test_a_bad_change_is_counted_and_changes_nothing(scheduler: RunningScheduler, path: Path, clock: Clock) -> None:
    _replace(path, "orgs: [")
    _look_twice(scheduler, clock)
    registry = scheduler.scheduler.metrics.registry
    await until(lambda: registry.get_sample_value("forebay_policy_failures_total") == 1)
    assert scheduler.scheduler.orgs.get("acme").tokens_burst == 100


def test_a_policy_file_that_cannot_be_used_stops_the_start(path: Path) -> None:
    path.write_text("orgs:\n  acme: {speed: 1}\n")
    with pytest.raises(SettingsError, match=rf"^FOREBAY_POLICY_FILE can't be used: {path}:2: 'speed' is no field of orgs.acme"):
        open_policy(SchedulerSettings(policy_file=path))


def _look_twice(scheduler: RunningScheduler, clock: Clock) -> None:
    for clock.now in (1.0, 2.0):
        scheduler.scheduler.orgs.get("acme")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
