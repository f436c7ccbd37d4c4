"""quota.lua in the scripts that use it: both buckets or none, once per request, and back to where it was whatever ends it."""

from collections.abc import AsyncIterator

import pytest

from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.ledger import Lease, Queued, Settlement, Timing
from services.scheduler.quota import Bucket, Over, QuotaState
from tests.quota_bench import QuotaBench, limited, quota_bench
from tests.scheduler_harness import ledger_bench, make_ticket, make_worker

MINUTE = 60_000
LIMITS = limited(requests_per_minute=60, tokens_per_minute=600)
SLOW = limited(requests_per_minute=1, requests_burst=100, tokens_per_minute=10, tokens_burst=1000)
"""make_ticket reserves 16 prompt tokens + 16."""


@pytest.fixture
async def bench(redis_server) -> AsyncIterator[QuotaBench]:
    async with quota_bench(redis_server.url) as bench:
        yield bench


async def _place(bench: QuotaBench, request_id: str = "a", org: OrgPolicy = LIMITS) -> Lease:
    worker = make_worker(slots=100, num_blocks=1000)
    await bench.ledger.register(worker.worker_id, worker.incarnation)
    assert await bench.take(make_ticket(request_id), org)
    lease = await bench.commit(make_ticket(request_id), worker)
    assert isinstance(lease, Lease)
    return lease


async def test_a_ticket_takes_a_request_and_all_the_tokens_it_could_use(bench: QuotaBench) -> None:
    answer = await bench.enqueue(make_ticket("a", n=3, max_tokens=50), org=LIMITS)
    assert answer.quota == QuotaState(Bucket(60, 59, 1.0), Bucket(600, 600 - 166, 16.6))
    assert await bench.spent() == (1, 166)
    assert await bench.live() == {"a"}


async def test_a_refusal_takes_nothing_from_any_bucket_and_queues_nothing(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=60, tokens_per_minute=40)
    assert await bench.take(make_ticket("a"), org)
    over = await bench.enqueue(make_ticket("b"), org=org)
    assert over == Over(("tokens",), 36.0, QuotaState(Bucket(60, 59, 1.0), Bucket(40, 8, 48.0)))
    assert await bench.spent() == (1, 32)
    assert await bench.waiting() == ["a"]
    assert await bench.live() == {"a"}
    assert await bench.raw("EXISTS", keys.ticket("b")) == 0


async def test_every_limit_that_stands_in_the_way_is_named(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=1, tokens_per_minute=32, max_concurrent=1)
    assert await bench.take(make_ticket("a"), org)
    over = await bench.enqueue(make_ticket("b"), org=org)
    assert (over.kinds, over.wait_seconds) == (("requests", "tokens", "concurrent"), 60.0)


async def test_who_comes_back_when_told_is_let_in_and_not_a_moment_earlier(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=7, tokens_per_minute=33)
    assert await bench.take(make_ticket("a"), org)
    over = await bench.enqueue(make_ticket("b"), org=org)
    assert isinstance(over, Over)
    await bench.advance(round(over.wait_seconds * 1000) - 1)
    assert not await bench.take(make_ticket("b"), org)
    await bench.advance(1)
    assert await bench.take(make_ticket("b"), org)


async def test_coming_again_takes_nothing_more(bench: QuotaBench) -> None:
    for _ in range(3):
        assert await bench.take(make_ticket("a"), LIMITS)
    await _place(bench)
    again = await bench.enqueue(make_ticket("a"), "h2", org=LIMITS)
    assert isinstance(again, Lease)
    assert again.quota == QuotaState(Bucket(60, 59, 1.0), Bucket(600, 568, 3.2))
    assert await bench.take(make_ticket("a", num_delivered_tokens=4), LIMITS, lost_epoch=1), "its worker was lost"
    assert await bench.spent() == (1, 32)
    assert await bench.live() == {"a"}


async def test_a_lease_asked_for_again_says_what_is_left_of_full_buckets_too(bench: QuotaBench) -> None:
    await _place(bench)
    await bench.advance(MINUTE)
    again = await bench.enqueue(make_ticket("a"), "h2", org=LIMITS)
    assert again.quota == QuotaState(Bucket(60, 60, 0.0), Bucket(600, 600, 0.0))


async def test_finish_settles_to_what_was_used(bench: QuotaBench) -> None:
    await _place(bench)
    assert (await bench.ledger.finish("a", 1, Settlement(16, 5)))[0]
    assert await bench.spent() == (1, 21)
    assert await bench.live() == set()
    assert not (await bench.ledger.finish("a", 1, Settlement(16, 0)))[0]
    assert await bench.spent() == (1, 21)


async def test_a_request_that_failed_is_given_back_whole(bench: QuotaBench) -> None:
    await _place(bench)
    await bench.ledger.finish("a", 1, Settlement(16, 5, failed=True, free=True))
    assert await bench.spent() == (0, 0)


async def test_no_more_is_charged_than_was_reserved(bench: QuotaBench) -> None:
    await _place(bench)
    await bench.ledger.finish("a", 1, Settlement(10**6, 10**6))
    assert await bench.spent() == (1, 32)


async def test_a_refund_fills_a_bucket_to_the_brim_at_most(bench: QuotaBench) -> None:
    await _place(bench)
    await bench.advance(10 * MINUTE)
    await bench.ledger.finish("a", 1, Settlement(16, 0))
    answer = await bench.enqueue(make_ticket("b"), org=LIMITS)
    assert (answer.quota.requests.remaining, answer.quota.tokens.remaining) == (59, 568)


async def test_withdrawn_and_dropped_tickets_are_given_back_whole(bench: QuotaBench) -> None:
    for request_id, reason in (("a", "withdrawn"), ("b", "deadline"), ("c", "no_worker")):
        assert await bench.take(make_ticket(request_id), LIMITS)
        assert await bench.ledger.withdraw(request_id, "h", reason)
    assert await bench.spent() == (0, 0)
    assert await bench.live() == set()
    assert await bench.raw("EXISTS", keys.quota("acme")) == 0


async def test_a_ticket_that_is_put_out_for_another_is_given_back_whole(redis_server) -> None:
    async with quota_bench(redis_server.url, max_queued=1) as bench:
        assert await bench.take(make_ticket("batch", latency_class=3), LIMITS)
        assert not await bench.take(make_ticket("urgent", latency_class=1), limited(tokens_per_minute=33)), (
            "nobody is put out for a refusal"
        )
        assert await bench.waiting() == ["batch"]
        assert await bench.take(make_ticket("urgent", latency_class=1, org="other"), limited("other", tokens_per_minute=33))
        assert await bench.waiting() == ["urgent"]
        assert await bench.spent() == (0, 0)
        assert await bench.live() == set()


async def test_what_the_sweep_ends_is_settled_from_its_last_count(redis_server) -> None:
    async with quota_bench(redis_server.url, timing=Timing(5, 5, 5, 60)) as bench:
        await bench.ledger.sweep()
        for request_id in ("running", "idle", "starting"):
            await _place(bench, request_id, SLOW)
        assert await bench.take(make_ticket("queued"), SLOW)
        lease = Lease("running", 1, "w1", "i1", "", 0)
        await bench.beat(make_worker(), lease, tokens=7)
        await bench.beat(make_worker(), lease, Lease("idle", 1, "w1", "i1", "", 0), tokens=0)
        await bench.beat(make_worker(), lease, tokens=7)
        await bench.advance(6_000)
        ended = {(e.request_id, e.reason) for e in await bench.ledger.sweep()}
        assert ended == {("running", "expired"), ("idle", "expired"), ("starting", "not started"), ("queued", "dropped")}
        assert await bench.live() == set()
        assert await bench.spent() == (0.9, 22), "16 prompt tokens and 7 that a client may have, less what 6 s regain"


async def test_an_expired_lease_that_goes_on_is_live_again_and_settled_at_its_end(redis_server) -> None:
    async with quota_bench(redis_server.url, timing=Timing(5, 5, 5, 60)) as bench:
        await bench.ledger.sweep()
        lease = await _place(bench, org=SLOW)
        await bench.beat(make_worker(), lease, tokens=7)
        await bench.advance(6_000)
        assert len(await bench.ledger.sweep()) == 1
        await bench.beat(make_worker(), lease, tokens=9)
        assert await bench.live() == {"a"}
        await bench.ledger.finish("a", 1, Settlement(16, 12))
        assert await bench.live() == set()
        assert await bench.spent() == (0.9, 27)


async def test_a_ticket_that_comes_back_is_charged_again_once(bench: QuotaBench) -> None:
    assert await bench.take(make_ticket("a"), LIMITS)
    await bench.ledger.withdraw("a", "h", "withdrawn")
    await _place(bench)
    assert await bench.spent() == (1, 32)
    assert await bench.live() == {"a"}


async def test_a_running_request_moves_on_whatever_is_left(bench: QuotaBench) -> None:
    org = limited(tokens_per_minute=64, max_concurrent=2)
    await _place(bench, "a", org)
    worker = make_worker("w1", "i2")
    assert await bench.ledger.register(worker.worker_id, worker.incarnation) == 1, "its worker has restarted"
    assert await bench.spent() == (0, 0)
    for request_id in ("b", "c"):
        assert await bench.take(make_ticket(request_id), org)
    assert await bench.take(make_ticket("a", num_delivered_tokens=3), org, lost_epoch=1)
    assert (await bench.spent())[1] == 96
    assert not await bench.take(make_ticket("d"), org)


async def test_concurrency_counts_what_is_queued_or_runs(bench: QuotaBench) -> None:
    org = limited(max_concurrent=2)
    await _place(bench, "a", org)
    assert await bench.take(make_ticket("b"), org)
    over = await bench.enqueue(make_ticket("c"), org=org)
    assert (over.kinds, over.wait_seconds) == (("concurrent",), 0.0)
    assert await bench.take(make_ticket("b"), org), "it is in already"
    await bench.ledger.finish("a", 1, Settlement())
    assert await bench.take(make_ticket("c"), org)


async def test_orgs_have_their_own(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=1)
    assert await bench.take(make_ticket("a"), org)
    assert not await bench.take(make_ticket("b"), org)
    other = limited("other", requests_per_minute=1)
    assert await bench.take(make_ticket("c", org="other"), other)


async def test_a_flushed_redis_has_full_buckets_and_locks_nobody_out(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=2, tokens_per_minute=64, max_concurrent=2)
    lease = await _place(bench, "a", org)
    queued = await bench.enqueue(make_ticket("b"), org=org)
    assert isinstance(queued, Queued)
    await bench.flush()
    assert await bench.beat(make_worker(), lease, tokens=5) == [], "the worker's word is taken"
    assert await bench.take(make_ticket("b", order=queued.order), org), "its stream comes again"
    assert await bench.take(make_ticket("c"), org)
    assert await bench.live() == {"b", "c"}
    assert (await bench.ledger.finish("a", 1, Settlement(16, 9)))[0]
    assert await bench.spent() == (2, 64)


async def test_a_clock_set_back_locks_nobody_out(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=60, requests_burst=1)
    assert await bench.take(make_ticket("a"), org)
    await bench.advance(-60 * MINUTE)
    over = await bench.enqueue(make_ticket("b"), org=org)
    assert over.wait_seconds == 1.0
    await bench.advance(1000)
    assert await bench.take(make_ticket("b"), org)


async def test_a_smaller_bucket_begins_empty_at_most(bench: QuotaBench) -> None:
    assert await bench.take(make_ticket("a", max_tokens=9_000), limited(tokens_per_minute=10_000))
    over = await bench.enqueue(make_ticket("b"), org=limited(tokens_per_minute=60))
    assert over.wait_seconds == 32.0


async def test_a_limit_that_is_lifted_leaves_nothing_behind(bench: QuotaBench) -> None:
    assert await bench.take(make_ticket("a"), limited(tokens_per_minute=32))
    assert await bench.take(make_ticket("b"), limited())
    assert await bench.raw("EXISTS", keys.quota("acme")) == 0
    assert await bench.take(make_ticket("c"), limited(tokens_per_minute=32))


async def test_the_largest_numbers_are_counted_exactly(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=10**11, tokens_per_minute=10**11 - 1)
    assert await bench.take(make_ticket("a", max_tokens=2**31 - 1, n=16), org)
    assert await bench.spent() == (1, 16 + 16 * (2**31 - 1))
    await bench.advance(1)
    assert (await bench.spent())[1] == 16 + 16 * (2**31 - 1) - (10**11 - 1) / 60_000


async def test_a_debt_is_forgotten_when_it_is_regained(redis_server) -> None:
    """Case F22, on Redis's own clock."""
    async with ledger_bench(redis_server.url) as bench:
        await bench.enqueue(make_ticket("a"), org=limited(requests_per_minute=2, tokens_per_minute=64))
        assert 29_000 < await bench.raw("PTTL", keys.quota("acme")) <= 30_000


@pytest.mark.parametrize("started", [True, False])
async def test_a_finish_after_an_outage_charges_the_difference_once(redis_server, started: bool) -> None:
    async with quota_bench(redis_server.url, timing=Timing(5, 5, 5, 60)) as bench:
        await bench.ledger.sweep()
        lease = await _place(bench, org=SLOW)
        if started:
            await bench.beat(make_worker(), lease, tokens=2)
        await bench.advance(6_000)
        assert len(await bench.ledger.sweep()) == 1
        before = (1, 18 - 1) if started else (0, 0)
        assert await bench.spent() == (pytest.approx(before[0] - 0.1 * started), before[1])
        for _ in range(2):
            await bench.ledger.finish("a", 1, Settlement(16, 9))
        assert await bench.spent() == (pytest.approx(1 - 0.1 * started), 25 - started)
        assert await bench.live() == set()
