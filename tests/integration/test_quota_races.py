"""Three schedulers at one limit at once: a thousand requests each way, and no more let through than there is."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from forebay.v1 import scheduler_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.policy.org import OrgPolicy
from services.policy.watched import PolicyFile
from services.scheduler import keys
from services.scheduler.ledger import Queued, Settlement, Timing
from services.scheduler.quota import Over
from services.scheduler.usage import Usage
from tests.quota_bench import limited
from tests.scheduler_harness import (
    LedgerBench,
    fake_worker,
    lease_of,
    ledger_bench,
    make_ticket,
    make_worker,
    running_scheduler,
    wire_ticket,
)

REQUESTS = 1000


@asynccontextmanager
async def _three(url: str) -> AsyncIterator[list[LedgerBench]]:
    """Three schedulers' ledgers on one Redis."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ledger_bench(url, max_queued=10_000)) for _ in range(3)]


async def _storm(benches: list[LedgerBench], org: OrgPolicy, **fields: int) -> tuple[list[str], float]:
    """Ids of those let in, and how long it took at most."""
    began = time.monotonic()

    async def ask(number: int) -> str:
        answer = await benches[number % len(benches)].enqueue(make_ticket(f"r{number}", **fields), org=org)
        assert isinstance(answer, Queued | Over)
        return f"r{number}" if isinstance(answer, Queued) else ""

    answers = await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    return [request_id for request_id in answers if request_id], time.monotonic() - began


async def test_requests_at_a_limit(redis_server) -> None:
    """Case X11."""
    async with _three(redis_server.url) as benches:
        accepted, seconds = await _storm(benches, limited(requests_per_minute=300))
        assert 300 <= len(accepted) <= 300 + 300 * seconds / 60
        assert await _waiting(benches) == len(accepted)


async def test_tokens_at_a_limit(redis_server) -> None:
    """Case B39: all reserved before any is used."""
    async with _three(redis_server.url) as benches:
        accepted, seconds = await _storm(benches, limited(tokens_per_minute=6_000), num_prompt_tokens=10, max_tokens=10)
        assert 300 <= len(accepted) <= 300 + 300 * seconds / 60
        assert await _waiting(benches) == len(accepted)


async def test_concurrency_at_a_limit(redis_server) -> None:
    async with _three(redis_server.url) as benches:
        org = limited(max_concurrent=77)
        accepted, _ = await _storm(benches, org)
        assert len(accepted) == 77
        for request_id in accepted[:7]:
            assert await benches[0].ledger.withdraw(request_id, "h", "withdrawn")
        again, _ = await _storm(benches, org)
        assert len(set(again) - set(accepted[7:])) == 7


async def test_a_request_ended_by_three_at_once_is_recorded_once(redis_server) -> None:
    async with _three(redis_server.url) as benches:
        org = limited(requests_per_minute=1, requests_burst=1000, tokens_per_minute=1, tokens_burst=100_000, max_concurrent=1000)
        worker = make_worker(slots=100, num_blocks=1000)
        await benches[0].ledger.register(worker.worker_id, worker.incarnation)
        for number in range(50):
            await benches[0].enqueue(make_ticket(f"r{number}"), org=org)
            await benches[0].commit(make_ticket(f"r{number}"), worker)
        ends = [bench.ledger.finish(f"r{number}", 1, Settlement(16, 4)) for number in range(50) for bench in benches]
        others = [bench.ledger.withdraw(f"r{number}", "h", "withdrawn") for number in range(50) for bench in benches]
        await asyncio.gather(*ends, *others)
        (row,) = await Usage(benches[0].store).rows("acme", 1)
        assert (row.requests, row.failed) == (50, 0)
        finished = row.completion // 4
        assert row.prompt == 16 * finished
        answer = await benches[1].enqueue(make_ticket("last", max_tokens=0), org=org)
        assert isinstance(answer, Queued)
        assert 1000 - finished - 1 <= answer.quota.requests.remaining <= 1000 - finished
        assert answer.quota.tokens.remaining in range(100_000 - 20 * finished - 16, 100_000 - 20 * finished - 14)


async def test_three_schedulers_place_as_many_as_an_org_may(redis_server, tmp_path: Path) -> None:
    """Over gRPC: whoever is not placed is told so at once, and when all have ended everything is as it was."""
    path = tmp_path / "policy.yaml"
    path.write_text(
        "orgs:\n  acme: {requests_per_minute: 1, requests_burst: 90, tokens_per_minute: 1, tokens_burst: 100000, max_concurrent: 80}\n"
    )
    async with AsyncExitStack() as stack:
        schedulers = [
            await stack.enter_async_context(
                running_scheduler(redis_server.url, f"s{number}", policy=PolicyFile(path), redis_timeout=5.0, timing=Timing(30, 30, 30, 5))
            )
            for number in range(3)
        ]
        await stack.enter_async_context(fake_worker(*schedulers, slots=200, num_blocks=2000))

        async def ask(number: int) -> scheduler_pb2.Lease | StatusError:
            call = schedulers[number % 3].place(wire_ticket(f"r{number}"))
            try:
                return await lease_of(call)
            except grpc.aio.AioRpcError as error:
                return from_rpc(error)

        answers = await asyncio.gather(*(ask(number) for number in range(300)))
        leases = [answer for answer in answers if isinstance(answer, scheduler_pb2.Lease)]
        refused = [answer for answer in answers if isinstance(answer, StatusError)]
        assert len(leases) == 80
        assert {error.code for error in refused} == {Code.RESOURCE_EXHAUSTED}
        ends = [
            schedulers[number % 3].stub.Finish(scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, status_code=13))
            for number, lease in enumerate(leases)
        ]
        assert all(answer.ended for answer in await asyncio.gather(*ends))
        (reply,) = await schedulers[0].store.commands(["EXISTS", keys.quota("acme"), keys.live("acme")])
        assert reply == 0


async def _waiting(benches: list[LedgerBench]) -> int:
    return len(await benches[0].waiting())
