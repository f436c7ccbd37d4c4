"""claim.lua, and what enqueue.lua and usage.lua make of it: a key's tries are one request, and one record."""

from collections.abc import AsyncIterator

import pytest

from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.claims import Claim, Claimed, Claims
from services.scheduler.ledger import Finished, Full, Lease, Queued, Settlement, Superseded, Timing
from services.scheduler.usage import Usage, UsageRow
from tests.quota_bench import START_MS, QuotaBench, limited, quota_bench
from tests.scheduler_harness import make_ticket, make_worker

ID = "5" * 30 + "00"
FIRST = Claim(ID, 7, "tiny@fp32", "v1")
HOUR_MS = 3_600_000


@pytest.fixture
async def bench(redis_server) -> AsyncIterator[QuotaBench]:
    async with quota_bench(redis_server.url, timing=Timing(5, 5, 5, 60), max_queued=2) as bench:
        await bench.ledger.sweep()
        worker = make_worker(slots=100, num_blocks=1000)
        await bench.ledger.register(worker.worker_id, worker.incarnation)
        yield bench


async def _claim(bench: QuotaBench, number: int = 1, *, org: str = "acme", digest: str = "d", most: int = 100, key: str = "k") -> Claimed:
    claim = Claim(f"{number:030x}00", number, "tiny@fp32", "v1")
    return await Claims(bench.store, most=most).make(org, key, digest, claim, 60.0)


async def _try(bench: QuotaBench, holder: str = "h") -> int:
    """One more try of the same key, queued; the epoch that it names as lost."""
    claimed = await Claims(bench.store).make("acme", "k", "d", FIRST, 60.0)
    assert claimed.first == FIRST
    assert isinstance(await bench.enqueue(make_ticket(ID), holder, lost_epoch=claimed.lost_epoch), Queued)
    return claimed.lost_epoch


async def _placed(bench: QuotaBench, holder: str = "h") -> Lease:
    await _try(bench, holder)
    lease = await bench.commit(make_ticket(ID), make_worker(slots=100, num_blocks=1000))
    assert isinstance(lease, Lease)
    return lease


async def _rows(bench: QuotaBench, days: int = 1, at_ms: int = START_MS) -> list[UsageRow]:
    return await Usage(bench.store, lambda: at_ms / 1000).rows("acme", days)


def _row(**counts: int) -> UsageRow:
    return UsageRow("acme", "2023-11-14", "tiny@fp32", 2, **counts)


async def test_every_try_finds_what_the_first_one_brought(bench: QuotaBench) -> None:
    first = await _claim(bench, 1)
    again = await _claim(bench, 2)
    assert first.first == again.first == Claim(f"{1:030x}00", 1, "tiny@fp32", "v1")
    assert (first.tries, again.tries) == (1, 2)
    assert first.created_at == again.created_at == START_MS / 1000


async def test_a_key_is_its_orgs(bench: QuotaBench) -> None:
    await _claim(bench, 1)
    assert (await _claim(bench, 2, org="other", digest="another")).first.seed == 2


async def test_another_request_under_the_same_key_is_refused_and_changes_nothing(bench: QuotaBench) -> None:
    await _claim(bench, 1)
    with pytest.raises(StatusError) as refused:
        await _claim(bench, 2, digest="another")
    assert (refused.value.code, refused.value.reason) == (Code.INVALID_ARGUMENT, "IDEMPOTENCY_KEY_REUSED")
    assert (await _claim(bench, 3)).tries == 2


async def test_an_orgs_oldest_key_is_forgotten_for_a_new_one(bench: QuotaBench) -> None:
    for number, key in enumerate(("a", "b", "c"), start=1):
        await bench.advance(1)
        await _claim(bench, number, key=key, most=2)
    await _claim(bench, 4, org="other", key="a", most=2)
    assert (await _claim(bench, 5, key="b", most=2)).first.seed == 2
    assert (await _claim(bench, 6, key="a", most=2)).first.seed == 6
    left = [key for key in await bench.raw("KEYS", "*") if ":claim:" in key or ":once:" in key]
    assert len(left) == 6, "two of each org's keys, and nothing of those that are forgotten"


async def test_a_key_is_kept_beyond_its_deadline_then_for_an_hour_from_its_end(bench: QuotaBench) -> None:
    await _placed(bench)
    claim, once = keys.claim(ID[:-2]), keys.once("acme", "k")
    for key in (claim, once, keys.onces("acme")):
        assert HOUR_MS + 50_000 < await bench.raw("PTTL", key) <= HOUR_MS + 60_000
    await bench.ledger.finish(ID, keys.EPOCHS_PER_TRY + 1, Settlement(16, 5))
    assert HOUR_MS - 10_000 < await bench.raw("PTTL", claim) <= HOUR_MS
    assert await bench.raw("PTTL", once) > HOUR_MS, "it outlives the claim: a key without one is new"


async def test_a_key_whose_claim_has_expired_is_new(bench: QuotaBench) -> None:
    await _claim(bench, 1)
    await bench.raw("DEL", keys.claim(f"{1:030x}"))
    assert (await _claim(bench, 2, digest="another")).first.seed == 2


async def test_a_finished_request_runs_again_and_is_recorded_once(bench: QuotaBench) -> None:
    first = await _placed(bench)
    await bench.ledger.finish(ID, first.epoch, Settlement(16, 5))
    again = await _placed(bench)
    assert again.epoch == first.epoch + keys.EPOCHS_PER_TRY
    await bench.ledger.finish(ID, again.epoch, Settlement(16, 5, cached_tokens=16))
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=5, cached=16)]


async def test_it_is_one_record_after_the_ticket_is_forgotten_and_a_day_has_passed(bench: QuotaBench) -> None:
    await bench.ledger.finish(ID, (await _placed(bench)).epoch, Settlement(16, 5))
    await bench.raw("DEL", keys.ticket(ID))
    await bench.advance(86_400_000)
    await bench.ledger.finish(ID, (await _placed(bench)).epoch, Settlement(16, 5))
    assert await _rows(bench, 2, START_MS + 86_400_000) == [_row(requests=1, prompt=16, completion=5)]


async def test_a_try_that_is_left_early_takes_nothing_back(bench: QuotaBench) -> None:
    await bench.ledger.finish(ID, (await _placed(bench)).epoch, Settlement(16, 50))
    await bench.ledger.finish(ID, (await _placed(bench)).epoch, Settlement(16, 1))
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=50)]


async def test_a_dead_gateways_request_that_is_tried_again_is_one_success(bench: QuotaBench) -> None:
    lease = await _placed(bench)
    await bench.beat(make_worker(), lease, tokens=7)
    await bench.advance(6_000)
    assert [ended.reason for ended in await bench.ledger.sweep()] == ["expired"]
    assert await _rows(bench) == [_row(requests=1, failed=1, prompt=16, completion=7)]
    await bench.ledger.finish(ID, (await _placed(bench)).epoch, Settlement(16, 9))
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=9)]


async def test_a_new_try_ends_the_running_ones_lease(bench: QuotaBench) -> None:
    first = await _placed(bench)
    await bench.beat(make_worker(), first, tokens=3)
    await _try(bench, "h2")
    worker = make_worker(slots=100, num_blocks=1000)
    assert await bench.beat(worker, first) == [(ID, first.epoch)], "its worker is told to stop"
    again = await bench.commit(make_ticket(ID), worker)
    assert isinstance(again, Lease)
    assert await bench.ledger.finish(ID, first.epoch, Settlement(16, 3)) == (False, ""), "its gateway's word counts no more"
    await bench.ledger.finish(ID, again.epoch, Settlement(16, 5))
    assert await _rows(bench) == [_row(requests=1, prompt=16, completion=5)]
    assert await bench.live() == set()


async def test_an_older_try_is_superseded_wherever_the_request_stands(bench: QuotaBench) -> None:
    old, new = keys.EPOCHS_PER_TRY, 2 * keys.EPOCHS_PER_TRY
    first = await _placed(bench)
    await _try(bench, "h2")
    assert await bench.enqueue(make_ticket(ID), lost_epoch=first.epoch) == Superseded()
    again = await bench.commit(make_ticket(ID), make_worker(slots=100, num_blocks=1000))
    assert await bench.enqueue(make_ticket(ID), lost_epoch=old) == Superseded()
    assert isinstance(again, Lease)
    await bench.ledger.finish(ID, again.epoch, Settlement(16, 5))
    assert await bench.enqueue(make_ticket(ID), lost_epoch=old) == Superseded()
    assert await bench.enqueue(make_ticket(ID), lost_epoch=new) == Finished(), "a try's own Place calls stay idempotent"


async def test_one_trys_place_calls_answer_the_same_lease(bench: QuotaBench) -> None:
    lease = await _placed(bench)
    answer = await bench.enqueue(make_ticket(ID), "h2", lost_epoch=keys.EPOCHS_PER_TRY)
    assert answer == lease


async def test_a_worker_whose_lease_is_taken_over_is_not_taken_for_full(bench: QuotaBench) -> None:
    await _placed(bench)
    lease = await _placed(bench, "h2")
    assert lease.worker_id == "w1"


async def test_running_again_takes_from_the_quota_again_and_waits_its_turn(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=60, requests_burst=2)
    for _ in range(2):
        lost = (await Claims(bench.store).make("acme", "k", "d", FIRST, 60.0)).lost_epoch
        assert await bench.take(make_ticket(ID), org, lost_epoch=lost)
        lease = await bench.commit(make_ticket(ID), make_worker(slots=100, num_blocks=1000))
        assert isinstance(lease, Lease)
        await bench.ledger.finish(ID, lease.epoch, Settlement(16, 5))
    assert (await bench.spent())[0] == 2
    lost = (await Claims(bench.store).make("acme", "k", "d", FIRST, 60.0)).lost_epoch
    assert not await bench.take(make_ticket(ID), org, lost_epoch=lost), "a try is work, and refused as such"
    for number in range(2):
        await bench.enqueue(make_ticket(f"other{number}"))
    assert await bench.enqueue(make_ticket(ID), lost_epoch=lost) == Full(2)


async def test_taking_over_takes_nothing_more_from_the_quota(bench: QuotaBench) -> None:
    org = limited(requests_per_minute=60, requests_burst=1, max_concurrent=1)
    for tries in (1, 2, 3):
        assert await bench.take(make_ticket(ID), org, lost_epoch=tries * keys.EPOCHS_PER_TRY)
    assert (await bench.spent())[0] == 1


async def test_a_try_has_a_deadline_of_its_own(bench: QuotaBench) -> None:
    await bench.enqueue(make_ticket(ID), lost_epoch=keys.EPOCHS_PER_TRY, deadline_seconds=1)
    await bench.advance(2_000)
    answer = await bench.enqueue(make_ticket(ID), lost_epoch=2 * keys.EPOCHS_PER_TRY, deadline_seconds=60)
    assert isinstance(answer, Queued)
    assert answer.left_seconds == 60
