"""usage.lua in the scripts that use it: one record per request, whatever ends it, however often."""

from collections.abc import AsyncIterator

import pytest

from services.scheduler import keys
from services.scheduler.ledger import Lease, Settlement, Timing
from services.scheduler.usage import Usage, UsageRow
from tests.quota_bench import START_MS, QuotaBench, limited, quota_bench
from tests.scheduler_harness import make_ticket, make_worker

DAY_MS = 86_400_000
TODAY = "2023-11-14"


@pytest.fixture
async def bench(redis_server) -> AsyncIterator[QuotaBench]:
    async with quota_bench(redis_server.url, timing=Timing(5, 5, 5, 60)) as bench:
        await bench.ledger.sweep()
        yield bench


async def _place(bench: QuotaBench, request_id: str = "a", **fields: object) -> Lease:
    worker = make_worker(slots=100, num_blocks=1000)
    await bench.ledger.register(worker.worker_id, worker.incarnation)
    await bench.enqueue(make_ticket(request_id, **fields))
    lease = await bench.commit(make_ticket(request_id, **fields), worker)
    assert isinstance(lease, Lease)
    return lease


async def _rows(bench: QuotaBench, org: str = "acme", days: int = 1, at_ms: int = START_MS) -> list[UsageRow]:
    return await Usage(bench.store, lambda: at_ms / 1000).rows(org, days)


def _row(**counts: int) -> UsageRow:
    return UsageRow("acme", TODAY, "tiny@fp32", 2, **counts)


async def test_a_finished_request_is_recorded_once(bench: QuotaBench) -> None:
    await _place(bench)
    for _ in range(3):
        await bench.ledger.finish("a", 1, Settlement(16, 5, cached_tokens=8))
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=5, cached=8)]


async def test_rows_are_by_org_day_model_and_class(bench: QuotaBench) -> None:
    for number, fields in enumerate(({}, {}, {"latency_class": 3}, {"org": "b"}, {"model": "other@int4"})):
        await bench.enqueue(make_ticket(f"r{number}", **fields))
        await bench.ledger.withdraw(f"r{number}", "h", "withdrawn")
    await bench.advance(DAY_MS)
    await _place(bench, "late")
    await bench.ledger.finish("late", 1, Settlement(16, 1))
    later = START_MS + DAY_MS
    assert [(row.org, row.day, row.model, row.latency_class, row.requests) for row in await _rows(bench, "", 2, later)] == [
        ("acme", TODAY, "other@int4", 2, 1),
        ("acme", TODAY, "tiny@fp32", 2, 2),
        ("acme", TODAY, "tiny@fp32", 3, 1),
        ("acme", "2023-11-15", "tiny@fp32", 2, 1),
        ("b", TODAY, "tiny@fp32", 2, 1),
    ]
    assert [row.day for row in await _rows(bench, "acme", 1, later)] == ["2023-11-15"]
    assert await _rows(bench, "b", 1, later) == []


async def test_what_never_ran_is_a_request_without_tokens(bench: QuotaBench) -> None:
    await bench.enqueue(make_ticket("withdrawn"))
    await bench.ledger.withdraw("withdrawn", "h", "withdrawn")
    await bench.enqueue(make_ticket("dropped"))
    await _place(bench, "not started")
    await bench.advance(6_000)
    assert len(await bench.ledger.sweep()) == 2
    assert await _rows(bench) == [_row(requests=3, failed=2)], "who leaves by himself has not failed"


async def test_a_dead_gateways_request_is_recorded_from_its_workers_last_count(bench: QuotaBench) -> None:
    lease = await _place(bench)
    await bench.beat(make_worker(), lease, tokens=7)
    await bench.advance(6_000)
    for _ in range(2):
        await bench.ledger.sweep()
    assert await _rows(bench) == [_row(requests=1, failed=1, prompt=16, completion=7)]


async def test_a_finish_after_an_outage_settles_what_had_expired(bench: QuotaBench) -> None:
    lease = await _place(bench)
    await bench.beat(make_worker(), lease, tokens=7)
    await bench.advance(6_000)
    await bench.ledger.sweep()
    for _ in range(3):
        assert not (await bench.ledger.finish("a", 1, Settlement(16, 12, cached_tokens=2)))[0], "the sweep ended it"
    assert not (await bench.ledger.finish("a", 2, Settlement(16, 99)))[0]
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=12, cached=2)]


async def test_a_request_that_had_expired_and_went_on_is_still_one(bench: QuotaBench) -> None:
    lease = await _place(bench)
    await bench.beat(make_worker(), lease, tokens=7)
    await bench.advance(6_000)
    await bench.ledger.sweep()
    await bench.advance(DAY_MS)
    await bench.beat(make_worker(), lease, tokens=9)
    await bench.ledger.finish("a", 1, Settlement(16, 12, cached_tokens=2))
    rows = await _rows(bench, "acme", 2, START_MS + DAY_MS)
    assert rows == [_row(requests=1, prompt=16, completion=12, cached=2)], "all of it on the day of its first end"


async def test_a_request_that_moved_between_workers_is_one(bench: QuotaBench) -> None:
    await _place(bench)
    assert await bench.ledger.register("w1", "i2") == 1, "its lease has expired"
    await bench.enqueue(make_ticket("a", num_delivered_tokens=3), lost_epoch=1)
    assert isinstance(await bench.commit(make_ticket("a"), make_worker("w1", "i2")), Lease)
    await bench.ledger.finish("a", 2, Settlement(16, 9))
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=9)]


async def test_what_a_client_has_counts_though_its_next_worker_never_started(bench: QuotaBench) -> None:
    await _place(bench)
    await bench.enqueue(make_ticket("a", num_delivered_tokens=3, excluded_workers=frozenset({"w1"})), lost_epoch=1)
    await bench.ledger.withdraw("a", "h", "withdrawn")
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=3)]


async def test_a_lease_known_from_its_worker_alone_is_nobodys(bench: QuotaBench) -> None:
    lease = await _place(bench)
    await bench.flush()
    await bench.beat(make_worker(), lease, tokens=7)
    assert (await bench.ledger.finish("a", 1, Settlement(16, 9)))[0]
    assert await _rows(bench, "") == []


async def test_refused_requests_are_no_use(bench: QuotaBench) -> None:
    assert not await bench.take(make_ticket("a"), limited(tokens_per_minute=1))
    assert await _rows(bench, "") == []


async def test_days_are_kept_for_ninety(bench: QuotaBench) -> None:
    await bench.enqueue(make_ticket("a"))
    await bench.ledger.withdraw("a", "h", "withdrawn")
    day = START_MS // DAY_MS
    for key in (keys.usage(day, "acme"), keys.users(day)):
        assert 90 * 86_400 < await bench.raw("TTL", key) <= 91 * 86_400


async def test_odd_names_are_kept_apart(bench: QuotaBench) -> None:
    for number, org in enumerate(("a:b", 'a"', "ä\x00\n", "*")):
        await bench.enqueue(make_ticket(f"r{number}", org=org, model=f"m:{org}"))
        await bench.ledger.withdraw(f"r{number}", "h", "withdrawn")
    assert {(row.org, row.model, row.requests) for row in await _rows(bench, "")} == {
        (org, f"m:{org}", 1) for org in ("a:b", 'a"', "ä\x00\n", "*")
    }
