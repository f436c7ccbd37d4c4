"""reserve.lua: the quota of several tickets is taken together or not at all, and given back unless they are queued."""

from collections.abc import AsyncIterator

import pytest

from services.scheduler import keys
from services.scheduler.ledger import Full, Lease, Queued, Timing
from services.scheduler.quota import Bucket, Over, QuotaState
from services.scheduler.usage import Usage
from tests.quota_bench import QuotaBench, limited, quota_bench
from tests.scheduler_harness import make_ticket, make_worker

LIMITS = limited(requests_per_minute=60, requests_burst=5, tokens_per_minute=600, tokens_burst=100, max_concurrent=4)
THREE = [make_ticket(request_id) for request_id in "abc"]
"""32 tokens each."""


@pytest.fixture
async def bench(redis_server) -> AsyncIterator[QuotaBench]:
    async with quota_bench(redis_server.url, max_queued=2, timing=Timing(stream_gone=5, pause=60)) as bench:
        await bench.ledger.sweep()
        yield bench


async def test_all_are_taken_at_once(bench: QuotaBench) -> None:
    assert await bench.ledger.reserve(THREE, LIMITS) == QuotaState(Bucket(5, 2, 3.0), Bucket(100, 4, 9.6))
    assert (await bench.spent(), await bench.live()) == ((3, 96), {"a", "b", "c"})


@pytest.mark.parametrize(
    ("limits", "kinds"),
    [
        ({"requests_per_minute": 60, "requests_burst": 3}, ("requests",)),
        ({"tokens_per_minute": 600, "tokens_burst": 127}, ("tokens",)),
        ({"max_concurrent": 3}, ("concurrent",)),
    ],
)
async def test_where_one_does_not_fit_none_takes_anything(bench: QuotaBench, limits: dict[str, int], kinds: tuple[str, ...]) -> None:
    org = limited(**limits)
    assert isinstance(await bench.enqueue(make_ticket("first"), org=org), Queued)
    before = await bench.spent()
    answer = await bench.ledger.reserve(THREE, org)
    assert isinstance(answer, Over)
    assert answer.kinds == kinds
    assert (await bench.spent(), await bench.live()) == (before, {"first"})
    assert isinstance(await bench.ledger.reserve(THREE[:2], org), QuotaState)


async def test_what_is_reserved_is_not_taken_again(bench: QuotaBench) -> None:
    for _ in range(2):
        await bench.ledger.reserve(THREE, LIMITS)
    worker = make_worker()
    await bench.ledger.register(worker.worker_id, worker.incarnation)
    assert await bench.take(THREE[0], LIMITS)
    assert isinstance(await bench.commit(THREE[0], worker), Lease)
    await bench.ledger.reserve(THREE, LIMITS)  # sent again, late
    assert await bench.spent() == (3, 96)
    assert (await bench.finish("a", 1, 4))[0]
    assert (await bench.spent(), await bench.live()) == ((3, 84), {"b", "c"})
    await bench.ledger.reserve(THREE, LIMITS)
    assert (await bench.spent(), await bench.live()) == ((3, 84), {"b", "c"}), "an ended one has its own end"


async def test_what_nobody_queues_is_given_back_and_is_no_request(bench: QuotaBench) -> None:
    await bench.ledger.reserve(THREE, LIMITS)
    await bench.advance(4_900)
    assert await bench.take(THREE[0], LIMITS)
    assert await bench.ledger.sweep() == []
    assert await bench.live() == {"a", "b", "c"}
    await bench.advance(200)
    assert await bench.ledger.sweep() == []
    assert await bench.live() == {"a"}
    assert await bench.waiting() == ["a"]
    assert await bench.raw("EXISTS", keys.ticket("b"), keys.ticket("c")) == 0
    assert await Usage(bench.store).rows("acme", 1) == []
    assert await bench.take(THREE[1], LIMITS), "a late one takes its own"


async def test_what_finds_the_queue_full_gives_back_at_once(bench: QuotaBench) -> None:
    await bench.ledger.reserve(THREE, LIMITS)
    assert await bench.take(THREE[0], LIMITS)
    assert await bench.take(THREE[1], LIMITS)
    assert isinstance(await bench.enqueue(THREE[2], org=LIMITS), Full)
    assert (await bench.spent(), await bench.live()) == ((2, 64), {"a", "b"})


async def test_a_queued_ticket_goes_on_in_another_class_at_its_old_place(bench: QuotaBench) -> None:
    """It is asked for again, at another scheduler, which knows of a lower ceiling."""
    first = await bench.enqueue(make_ticket("a", latency_class=1), org=LIMITS)
    again = await bench.enqueue(make_ticket("a", latency_class=3), org=LIMITS)
    assert isinstance(first, Queued)
    assert isinstance(again, Queued)
    assert (again.order, await bench.spent()) == (first.order, (1, 32))
    survey = await bench.ledger.survey()
    assert list(survey.queues) == [keys.queue_name("tiny@fp32", 3, "acme")]
    assert await bench.ledger.withdraw("a", "h", "withdrawn")
    assert (await bench.waiting(), await bench.spent()) == ([], (0, 0))
