"""explain.lua and Explain: records last an hour, are bounded in number and bytes, and are shown to their own org alone."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from forebay.v1 import admin_pb2, explain_pb2, scheduler_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.scheduler import keys
from services.scheduler.explanations import Bounds, Explanations
from services.scheduler.ledger import Settlement
from tests.scheduler_harness import LedgerBench, RunningScheduler, running_scheduler


def _record(request_id: str, org: str = "acme", num_events: int = 0) -> explain_pb2.Explanation:
    timeline = explain_pb2.Timeline(events=[explain_pb2.TimelineEvent(kind=2, at_seconds=1, num_tokens=9)] * num_events)
    attempt = explain_pb2.Attempt(epoch=1, timeline=timeline, parts=[explain_pb2.Part(phase=2, seconds=0.5)])
    return explain_pb2.Explanation(request_id=request_id, org=org, total_seconds=1.5, attempts=[attempt])


async def _keep(bench: LedgerBench, explanations: Explanations, record: explain_pb2.Explanation) -> None:
    call = explanations.keep(record.request_id, record)
    assert call is not None
    await bench.ledger.finish(record.request_id, 0, Settlement(), call)


async def _known(explanations: Explanations, *request_ids: str) -> list[str]:
    answers = await asyncio.gather(*(explanations.get(request_id) for request_id in request_ids), return_exceptions=True)
    assert all(answer.code is Code.NOT_FOUND for answer in answers if isinstance(answer, StatusError))
    return [answer.request_id for answer in answers if isinstance(answer, explain_pb2.Explanation)]


async def test_a_record_comes_back_whole_and_goes_by_itself(bench: LedgerBench) -> None:
    explanations = Explanations(bench.store)
    await _keep(bench, explanations, _record("a", num_events=3))
    assert await explanations.get("a", "acme") == _record("a", num_events=3)
    left = [await bench.raw("TTL", key) for key in (keys.explanation("a"), keys.EXPLAINED, keys.EXPLAINED_BYTES)]
    assert all(3500 < seconds <= 3600 for seconds in left)


async def test_the_first_word_stands(bench: LedgerBench) -> None:
    explanations = Explanations(bench.store)
    for num_events in (3, 5):
        await _keep(bench, explanations, _record("a", num_events=num_events))
    assert len((await explanations.get("a")).attempts[0].timeline.events) == 3
    assert await bench.raw("LLEN", keys.EXPLAINED) == 1


async def test_the_oldest_make_place(bench: LedgerBench) -> None:
    explanations = Explanations(bench.store, Bounds(records=3))
    for name in "abcde":
        await _keep(bench, explanations, _record(name))
    assert await _known(explanations, *"abcde") == ["c", "d", "e"]
    assert int(await bench.raw("GET", keys.EXPLAINED_BYTES)) == sum([await bench.raw("STRLEN", keys.explanation(name)) for name in "cde"])


async def test_bytes_are_bounded_too(bench: LedgerBench) -> None:
    explanations = Explanations(bench.store, Bounds(bytes=1000))
    for name in "abcdef":
        await _keep(bench, explanations, _record(name, num_events=10))
    kept = await _known(explanations, *"abcdef")
    assert 0 < len(kept) < 6
    assert kept == list("abcdef")[-len(kept) :]
    assert int(await bench.raw("GET", keys.EXPLAINED_BYTES)) <= 1000


async def test_what_is_over_its_hour_leaves_the_list(bench: LedgerBench) -> None:
    explanations = Explanations(bench.store)
    await bench.raw("LPUSH", keys.EXPLAINED, '["old", 10, 1000]')
    await bench.raw("INCRBY", keys.EXPLAINED_BYTES, 10)
    await _keep(bench, explanations, _record("a"))
    assert await bench.raw("LLEN", keys.EXPLAINED) == 1


def test_a_large_record_loses_its_details_and_an_alien_one_is_none(bench: LedgerBench) -> None:
    explanations = Explanations(bench.store, Bounds(record_bytes=200))
    large = _record("a", num_events=100)
    call = explanations.keep("a", large)
    assert call is not None
    assert len(str(call.args[1])) < 300
    assert explanations.keep("b", large) is None
    assert large.attempts[0].timeline.events, "the caller's own is left alone"


@pytest.fixture
async def scheduler(redis_server) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(redis_server.url, "s1") as running:
        yield running


async def test_explain_is_for_the_own_org_and_says_no_more_to_others(scheduler: RunningScheduler) -> None:
    record = _record("r1")
    await scheduler.stub.Finish(scheduler_pb2.FinishRequest(request_id="r1", explanation=record))
    for org in ("", "acme"):
        answer = await scheduler.admin.Explain(admin_pb2.ExplainRequest(request_id="r1", org=org))
        assert answer.explanation == record
    words = []
    for request_id in ("r1", "r2"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.admin.Explain(admin_pb2.ExplainRequest(request_id=request_id, org="other"))
        error = from_rpc(caught.value)
        assert error.code is Code.NOT_FOUND
        words.append(error.message.replace(request_id, "ID"))
    assert words[0] == words[1], "others' ids are as unknown as those that never were"
