"""quota.lua beside others that count: a model in whole numbers, and the GCRA of throttled-py."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from throttled import RateLimiterType, Throttled, rate_limiter, utils
from throttled.store import MemoryStore

from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.ledger import Lease, Settlement, Timing
from tests.quota_bench import QuotaBench, limited, quota_bench
from tests.scheduler_harness import make_ticket, make_worker

SLOWLY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def bench(redis_server) -> AsyncIterator[QuotaBench]:
    async with quota_bench(redis_server.url, max_queued=10_000, timing=Timing(5, 5, 5, 60)) as bench:
        yield bench


@SLOWLY
@given(
    rate=st.sampled_from([15, 30, 60, 120, 240]),
    burst=st.integers(1, 40),
    calls=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=40),
)
async def test_tokens_are_let_through_as_by_throttled(bench: QuotaBench, rate: int, burst: int, calls: list[tuple[int, int]]) -> None:
    """Eighths of a second and rates whose interval is a power of two, so that the oracle's doubles are exact."""
    await bench.flush()
    now, patch = 1000.0, pytest.MonkeyPatch()
    patch.setattr(utils, "now_mono_f", lambda: now)
    oracle = Throttled(key="acme", using=RateLimiterType.GCRA.value, quota=rate_limiter.per_min(rate, burst), store=MemoryStore())
    org = limited(tokens_per_minute=rate, tokens_burst=burst)
    try:
        for number, (eighths, cost) in enumerate(calls):
            now += eighths / 8
            await bench.advance(eighths * 125)
            expected = oracle.limit(cost=cost)
            answer = await bench.enqueue(make_ticket(f"r{number}", num_prompt_tokens=cost, max_tokens=0), org=org)
            assert (await bench.raw("EXISTS", keys.ticket(f"r{number}")) == 0) is expected.limited
            if not expected.limited:
                assert answer.quota.tokens.remaining == expected.state.remaining
                assert answer.quota.tokens.reset_seconds == expected.state.reset_after
            elif cost <= burst:
                assert answer.wait_seconds == expected.state.retry_after
    finally:
        patch.undo()


@dataclass
class Model:
    """Both buckets of one org in whole 1/60000, and its live tickets."""

    rate: dict[str, int]
    burst: dict[str, int]
    debt: dict[str, int] = field(default_factory=lambda: {"requests": 0, "tokens": 0})
    held: dict[str, dict[str, int]] = field(default_factory=dict)

    def pass_time(self, ms: int) -> None:
        """Debts are regained."""
        for kind, debt in self.debt.items():
            self.debt[kind] = max(0, debt - ms * self.rate[kind])

    def take(self, request_id: str, tokens: int, most_live: int) -> bool:
        """All or nothing."""
        need = {"requests": 1, "tokens": tokens}
        fits = all(self.debt[kind] + need[kind] * 60_000 <= self.burst[kind] * 60_000 for kind in need)
        if not fits or len(self.held) >= most_live:
            return False
        self.held[request_id] = need
        for kind in need:
            self.debt[kind] += need[kind] * 60_000
        return True

    def end(self, request_id: str, used: dict[str, int]) -> None:
        """Gives back what was not used."""
        held = self.held.pop(request_id)
        for kind in used:
            self.debt[kind] = max(0, self.debt[kind] - (held[kind] - used[kind]) * 60_000)


ENDS = ["finish", "fail", "withdraw", "sweep"]
Step = tuple[str, Any]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 60)),
        st.tuples(st.just("pass"), st.integers(0, 30_000)),
        st.tuples(st.just("move"), st.integers(0, 100)),
        st.tuples(st.just("end"), st.tuples(st.sampled_from(ENDS), st.integers(0, 100), st.integers(0, 60))),
    ),
    max_size=40,
)


@SLOWLY
@given(
    rates=st.tuples(st.integers(1, 100), st.integers(1, 1000)),
    bursts=st.tuples(st.integers(1, 10), st.integers(1, 200)),
    live=st.integers(1, 8),
    steps=STEPS,
)
async def test_whatever_ends_requests_the_buckets_are_the_models(
    bench: QuotaBench, rates: tuple[int, int], bursts: tuple[int, int], live: int, steps: list[Step]
) -> None:
    """And when all is over and time has passed, nothing is left."""
    await bench.flush()
    org = limited(
        requests_per_minute=rates[0], tokens_per_minute=rates[1], requests_burst=bursts[0], tokens_burst=bursts[1], max_concurrent=live
    )
    model = Model({"requests": rates[0], "tokens": rates[1]}, {"requests": bursts[0], "tokens": bursts[1]})
    worker = make_worker(slots=100, num_blocks=10_000)
    await bench.ledger.register(worker.worker_id, worker.incarnation)
    for number, (step, how) in enumerate([*steps, *[("end", ("finish", 0, 1))] * live]):
        if step == "pass":
            await bench.advance(how)
            model.pass_time(how)
        elif step == "take":
            ticket = make_ticket(f"r{number}", num_prompt_tokens=1, max_tokens=how - 1)
            assert await bench.take(ticket, org, deadline_seconds=3600.0) is model.take(
                ticket.request_id, how, live
            )  # it may wait for all steps
        elif model.held and step == "move":
            request_id = sorted(model.held)[how % len(model.held)]
            await _move(bench, request_id, model.held[request_id]["tokens"], org)
        elif model.held:
            way, which, amount = how
            request_id = sorted(model.held)[which % len(model.held)]
            used = await _end(bench, request_id, way, min(amount, model.held[request_id]["tokens"] - 1))
            model.end(request_id, used)
        assert await bench.spent() == (model.debt["requests"] / 60_000, model.debt["tokens"] / 60_000)
        assert await bench.live() == set(model.held)
    await bench.advance(max(60_000 * 10 // rates[0], 60_000 * 200 // rates[1]) + 1)
    assert await bench.spent() == (0, 0)
    assert await bench.live() == set()


async def _move(bench: QuotaBench, request_id: str, tokens: int, org: OrgPolicy) -> None:
    """A request is placed, its worker lost, and it is queued again: nothing is charged."""
    ticket = make_ticket(request_id, num_prompt_tokens=1, max_tokens=tokens - 1, excluded_workers=frozenset({"w1"}))
    lease = await bench.commit(ticket, make_worker(slots=100, num_blocks=10_000))
    assert isinstance(lease, Lease)
    assert await bench.take(ticket, org, lost_epoch=lease.epoch)


async def _end(bench: QuotaBench, request_id: str, way: str, delivered: int) -> dict[str, int]:
    """Ends a queued request in this way, having delivered so much; what is to be charged."""
    nothing, all_of_it = {"requests": 0, "tokens": 0}, {"requests": 1, "tokens": 1 + delivered}
    if way == "withdraw":
        assert await bench.ledger.withdraw(request_id, "h", "withdrawn")
        return nothing
    worker = make_worker(slots=100, num_blocks=10_000)
    lease = await bench.commit(make_ticket(request_id), worker)
    assert isinstance(lease, Lease)
    if way == "sweep":
        await bench.beat(worker, lease, tokens=delivered)
        assert await bench.ledger.register("w1", "i2") == 1
        await bench.ledger.register("w1", "i1")
        return all_of_it if delivered else nothing
    failed = way == "fail"
    await bench.ledger.finish(request_id, lease.epoch, Settlement(1, delivered, failed=failed, free=failed))
    return nothing if failed else all_of_it


async def test_five_windows_just_under_a_limit_refuse_nobody(bench: QuotaBench) -> None:
    """Case X11: 95 % of a token limit for five minutes, reserved in full and settled to a half, across every window's edge."""
    org = limited(tokens_per_minute=10_000)
    worker = make_worker(slots=100, num_blocks=10_000)
    await bench.ledger.register(worker.worker_id, worker.incarnation)
    for number in range(5 * 95):
        ticket = make_ticket(f"r{number}", num_prompt_tokens=60, max_tokens=40)
        assert await bench.take(ticket, org), number
        assert isinstance(await bench.commit(ticket, worker), Lease)
        await bench.ledger.finish(ticket.request_id, 1, Settlement(60, 40 if number % 2 else 0))
        await bench.advance(60_000 // 95)


async def test_at_a_limit_a_minute_lets_a_minutes_worth_through(bench: QuotaBench) -> None:
    """Case X11: over any stretch, at most a full bucket and what it regains; afterwards nobody stays locked out.

    Ten a second come; a full bucket of 100, which regains 100 a minute, lasts for 12 s.
    """
    org = limited(requests_per_minute=100)
    accepted = []
    for tenth in range(3 * 600):
        if await bench.take(make_ticket(f"r{tenth}"), org):
            accepted.append(tenth)
        await bench.advance(100)
    assert accepted[:100] == list(range(100))
    for start in range(0, 3 * 600, 50):
        within = sum(start <= at < start + 600 for at in accepted)
        assert within <= (200 if start < 120 else 101)
    assert len(accepted) == 100 + 3 * 100 - 1
