"""The mesh client: placement, failover without lost or doubled tokens, deadlines, silence, and a lease that always ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from forebay.v1 import types_pb2, worker_pb2
from services.common.errors import Code, StatusError, abort, invalid, unavailable
from services.gateway.client import MeshCall
from services.gateway.mesh import Mesh, MeshLimits, RetryBudget
from services.gateway.wire import cache_salt
from tests.fakes import LENGTH, STOP, FakeScheduler, FakeWorker, Script, WorkerCall, play, serving, stall
from tests.unit.gateway.build import generation

FAST = MeshLimits(worker_silence=20.0, scheduler_answer=20.0, replace_patience=10.0, exclusion=0.2, backoff=0.01)


@asynccontextmanager
async def fleet(*scripts: Script, limits: MeshLimits = FAST) -> AsyncIterator[tuple[Mesh, FakeScheduler, list[FakeWorker]]]:
    workers = [FakeWorker(script, f"w{number}") for number, script in enumerate(scripts)]
    scheduler = FakeScheduler(workers)
    async with serving(*workers, scheduler):
        mesh = Mesh([scheduler.address], limits)
        try:
            yield mesh, scheduler, workers
        finally:
            await mesh.close()


async def run(mesh: Mesh, **fields: Any) -> tuple[MeshCall, list[Any]]:
    """Everything that a generation's call says."""
    async with MeshCall(mesh, generation(**fields)) as call, aclosing(call.events()) as stream:
        return call, [event async for event in stream]


def ids_of(events: list[Any], choice: int = 0) -> list[int]:
    """The choice's tokens, its positions checked to be gapless."""
    ids: list[int] = []
    for event in events:
        if isinstance(event, worker_pb2.TokenDelta) and event.choice_index == choice:
            if event.token_ids:
                assert event.first_position == len(ids)
            ids.extend(event.token_ids)
    return ids


async def test_tokens_come_in_order_and_the_lease_is_settled() -> None:
    async with fleet(play([5, 6, 7], cached_tokens=2)) as (mesh, scheduler, _):
        call, events = await run(mesh, prompt=[1, 2, 3])
        assert isinstance(events[0], worker_pb2.Accepted)
        assert ids_of(events) == [5, 6, 7]
        assert call.finished
        (finish,) = await scheduler.finishes.until_length(1)
    assert (finish.status_code, finish.finish_reason, finish.epoch) == (0, LENGTH, 1)
    assert finish.usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)
    assert 0 < finish.ttft_seconds <= finish.total_seconds


async def test_ticket_and_worker_request_say_who_and_what() -> None:
    async with fleet(play([5])) as (mesh, scheduler, (worker,)):
        wanted = generation(prompt=[1, 2], org="acme", max_tokens=9, n=2)
        async with MeshCall(mesh, wanted) as call, aclosing(call.events()) as events:
            async for _ in events:
                pass
        ticket, request = scheduler.places[0].ticket, worker.calls[0].request
    assert (ticket.request_id, ticket.org, ticket.num_prompt_tokens, ticket.max_tokens, ticket.n) == (wanted.request_id, "acme", 2, 9, 2)
    assert (request.request_id, request.org, request.epoch, request.incarnation) == (wanted.request_id, "acme", 1, "1")
    assert list(request.prompt_token_ids) == [1, 2]
    assert request.cache_salt == cache_salt("acme") != cache_salt("acme2")
    assert len(request.cache_salt) == 32


def dies_after(num_tokens: int, ids: list[int], how: Code = Code.UNAVAILABLE) -> Script:
    """Sends so many more tokens of `ids` than were delivered, then fails."""

    async def script(call: WorkerCall) -> None:
        await call.accept()
        done = call.num_sent.get(0, 0)
        for token in ids[done : done + num_tokens]:
            await call.tokens([token])
        await call.fail(how)

    return script


@pytest.mark.parametrize("how", [Code.UNAVAILABLE, Code.CANCELLED, Code.FAILED_PRECONDITION, Code.ABORTED])
async def test_a_lost_worker_costs_no_token(how: Code) -> None:
    ids = list(range(10, 20))
    async with fleet(dies_after(3, ids, how), play(ids)) as (mesh, scheduler, workers):
        _, events = await run(mesh)
        assert ids_of(events) == ids
        assert [place.lost_epoch for place in scheduler.places] == sorted(place.lost_epoch for place in scheduler.places)
        moved = workers[1].calls[0].request
        delivered = [token for each in moved.delivered for token in each.ids]
        assert delivered == ids[: scheduler.places[-1].num_delivered_tokens], "gRPC may drop what is unread when a call fails"
        assert len(delivered) <= 3
        finishes = await scheduler.finishes.until_length(1)
        assert finishes[0].epoch == moved.epoch


async def test_what_ran_where_workers_died_is_told_as_a_suspect_and_waits_for_their_word() -> None:
    ids = list(range(10, 20))
    async with fleet(dies_after(3, ids), play(ids), dies_after(3, ids)) as (mesh, scheduler, workers):
        _, events = await run(mesh)
        assert ids_of(events) == ids
        assert [worker.calls[0].request.suspect for worker in workers] == [False, True, True]
        assert [[dead.worker_id for dead in place.awaited] for place in scheduler.places][:3] == [[], [], ["w0", "w2"]]


async def test_what_was_sent_elsewhere_by_a_living_worker_is_no_suspect() -> None:
    async def drains(call: WorkerCall) -> None:
        await call.accept()
        await abort(call.context, unavailable("it is stopping", reason="DRAINED"))

    async with fleet(drains, play([5])) as (mesh, _, workers):
        await run(mesh)
        assert not workers[1].calls[0].request.suspect


async def test_an_unreachable_worker_is_avoided_for_a_while() -> None:
    async with fleet(dies_after(0, []), play([1, 2])) as (mesh, scheduler, _):
        await run(mesh)
        assert scheduler.places[-1].excluded_workers == ["w0"]
        assert mesh.excluded() == ["w0"]


async def test_a_doubtful_worker_is_better_than_none() -> None:
    async with fleet(play([1, 2])) as (mesh, scheduler, _):
        mesh.exclude("w0")
        _, events = await run(mesh)
        assert ids_of(events) == [1, 2]
        assert [list(place.excluded_workers) for place in scheduler.places] == [["w0"], []]


async def test_a_worker_process_that_is_gone_is_replaced() -> None:
    gate = asyncio.Event()

    async def hangs(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([7])
        gate.set()
        await asyncio.Event().wait()

    async with fleet(hangs, play([7, 8, 9])) as (mesh, _, workers):

        async def kill() -> None:
            await gate.wait()
            await workers[0].stop()

        killer = asyncio.create_task(kill())
        _, events = await run(mesh)
        await killer
    assert ids_of(events) == [7, 8, 9]


async def test_repeated_tokens_are_dropped_and_a_gap_is_a_fault() -> None:
    async def repeats(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([1, 2], first_position=0)
        await call.tokens([1, 2, 3], first_position=0)
        await call.tokens([9], first_position=7)

    async with fleet(repeats, play([1, 2, 3, 4])) as (mesh, _, _workers):
        _, events = await run(mesh)
    assert ids_of(events) == [1, 2, 3, 4]


async def test_prompt_logprobs_come_once_over_a_failover() -> None:
    async def half(call: WorkerCall) -> None:
        await call.accept()
        await call.prompt_logprobs(piece=2)
        await call.fail(Code.UNAVAILABLE)

    async with fleet(half, play([1])) as (mesh, _, _workers):
        _, events = await run(mesh, prompt=[11, 12, 13], prompt_logprobs=1)
    chosen = [entry.chosen.token_id for event in events[1:] for entry in event.prompt_logprobs]
    assert chosen == [11, 12, 13]


async def test_a_silent_worker_is_left() -> None:
    async with fleet(stall([1]), play([1, 2]), limits=replace(FAST, worker_silence=0.3)) as (mesh, _, workers):
        _, events = await run(mesh)
        assert ids_of(events) == [1, 2]
        await workers[0].cancelled.until_length(1)


async def test_pings_keep_a_slow_worker() -> None:
    async def slow(call: WorkerCall) -> None:
        await call.accept()
        for _ in range(6):
            await call.work(0.1)
            await call.ping()
        await call.tokens([1], reason=STOP)
        await call.complete()

    async with fleet(slow, limits=replace(FAST, worker_silence=0.4)) as (mesh, scheduler, _):
        _, events = await run(mesh)
        assert len(scheduler.places) == 1
    assert ids_of(events) == [1]


async def test_a_refusal_is_placed_again_without_blame() -> None:
    refusals = iter([Code.RESOURCE_EXHAUSTED, Code.RESOURCE_EXHAUSTED])

    async def full(call: WorkerCall) -> None:
        code = next(refusals, None)
        if code:
            await call.fail(code)
        await play([4])(call)

    async with fleet(full) as (mesh, scheduler, _):
        _, events = await run(mesh)
        assert ids_of(events) == [4]
        assert [place.lost_epoch for place in scheduler.places] == [0, 1, 2]
        assert mesh.excluded() == []


async def test_attempts_are_bounded() -> None:
    limits = replace(FAST, max_attempts=3, exclusion=0.0)
    async with fleet(dies_after(0, []), limits=limits) as (mesh, scheduler, workers):
        with pytest.raises(StatusError) as failure:
            await run(mesh)
        assert failure.value.code is Code.UNAVAILABLE
        assert failure.value.reason == "WORKER_LOST"
        assert failure.value.retry_after_seconds
        assert len(workers[0].calls) == 3
        (finish,) = await scheduler.finishes.until_length(1)
    assert finish.status_code == Code.UNAVAILABLE.value[0]


async def test_replacements_have_a_budget_over_all_requests() -> None:
    limits = replace(FAST, retry_capacity=1.0, retry_ratio=0.0, exclusion=0.0)
    async with fleet(dies_after(0, []), limits=limits) as (mesh, _, workers):
        for _ in range(3):
            with pytest.raises(StatusError):
                await run(mesh)
        assert len(workers[0].calls) == 4


def test_budget_earns_a_share_of_what_is_offered() -> None:
    budget = RetryBudget(2, 0.5)
    assert [budget.spend(), budget.spend(), budget.spend()] == [True, True, False]
    budget.earn()
    budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]


def test_budget_comes_back_with_time_and_never_beyond_its_capacity() -> None:
    now = [0.0]
    budget = RetryBudget(2, 0.5, per_second=4.0, clock=lambda: now[0])
    assert [budget.spend(), budget.spend(), budget.spend()] == [True, True, False]
    now[0] += 0.25
    assert [budget.spend(), budget.spend()] == [True, False]
    now[0] += 100
    assert [budget.spend(), budget.spend(), budget.spend()] == [True, True, False]


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.UNKNOWN, Code.INVALID_ARGUMENT])
async def test_a_request_s_own_failure_is_final(code: Code) -> None:
    async with fleet(dies_after(1, [3], code), play([3])) as (mesh, scheduler, _):
        with pytest.raises(StatusError) as failure:
            await run(mesh)
        assert failure.value.code is (Code.INVALID_ARGUMENT if code is Code.INVALID_ARGUMENT else Code.INTERNAL)
        assert len(scheduler.places) == 1


async def test_a_choice_that_the_engine_failed_on_fails_the_request() -> None:
    async def broken(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([1], reason=types_pb2.FINISH_REASON_ERROR)

    async with fleet(broken) as (mesh, _, _workers):
        with pytest.raises(StatusError, match="the engine failed"):
            await run(mesh)


async def test_the_scheduler_s_refusals_reach_the_client() -> None:
    async with fleet(play([1])) as (mesh, scheduler, _):
        scheduler.refusals.append(unavailable("the queue is full: try again", 7.0, reason="QUEUE_FULL"))
        with pytest.raises(StatusError) as failure:
            await run(mesh)
        assert (failure.value.reason, failure.value.retry_after_seconds) == ("QUEUE_FULL", 7.0)
        scheduler.refusals.append(invalid("max_tokens", "no worker could ever hold it"))
        with pytest.raises(StatusError) as failure:
            await run(mesh)
        assert failure.value.violations[0].field == "max_tokens"
        assert len(scheduler.finishes) == 0


async def test_another_scheduler_takes_over() -> None:
    worker = FakeWorker(play([1, 2]))
    dead, alive = FakeScheduler([worker]), FakeScheduler([worker])
    async with serving(worker, dead, alive):
        mesh = Mesh([dead.address, alive.address], FAST)
        await dead.stop()
        for _ in range(4):
            _, events = await run(mesh)
            assert ids_of(events) == [1, 2]
        assert (await mesh.fleet()).scheduler_id == "s1"
        await alive.finishes.until_length(4)
        await alive.stop()
        with pytest.raises(StatusError) as failure:
            await run(mesh)
        assert failure.value.reason == "NO_SCHEDULER"
        await mesh.close()


async def test_a_scheduler_that_dies_while_the_ticket_waits_is_left() -> None:
    worker = FakeWorker(play([1]))
    first, second = FakeScheduler([worker]), FakeScheduler([worker])
    async with serving(worker, first, second):
        first.gate.clear()
        second.gate.clear()
        mesh = Mesh([first.address, second.address], FAST)
        task = asyncio.create_task(run(mesh))
        await asyncio.wait(
            [asyncio.create_task(first.places.until_length(1)), task, asyncio.create_task(second.places.until_length(1))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        holder, other = (first, second) if first.places else (second, first)
        await holder.stop()
        await other.places.until_length(1)
        other.gate.set()
        _, events = await task
        assert ids_of(events) == [1]
        await mesh.close()


async def test_a_lost_worker_s_successor_is_waited_for() -> None:
    async with fleet(dies_after(2, [1, 2]), play([1, 2, 3])) as (mesh, scheduler, workers):
        workers[1].ready = False
        task = asyncio.create_task(run(mesh))
        await scheduler.places.until_length(3)  # the first, and two that found nobody
        workers[1].ready = True
        _, events = await task
    assert ids_of(events) == [1, 2, 3]


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_the_deadline_ends_every_state(where: str) -> None:
    async def stuck(call: WorkerCall) -> None:
        await call.accept()
        if where == "decode":
            await call.tokens([1])
        while True:
            await call.work(0.05)
            await call.ping()

    async with fleet(stuck) as (mesh, scheduler, workers):
        if where == "queue":
            scheduler.gate.clear()
        start = mesh.clock()
        with pytest.raises(StatusError) as failure:
            await run(mesh, deadline_seconds=0.4)
        assert failure.value.code is Code.DEADLINE_EXCEEDED
        assert 0.35 < mesh.clock() - start < 1.5
        if where == "queue":
            await scheduler.withdrawn.until_length(1)
        else:
            await workers[0].cancelled.until_length(1)
            (finish,) = await scheduler.finishes.until_length(1)
            assert finish.finish_reason == types_pb2.FINISH_REASON_DEADLINE
            assert finish.usage.completion_tokens == (1 if where == "decode" else 0)


async def test_a_deadline_that_has_passed_starts_nothing() -> None:
    async with fleet(play([1])) as (mesh, scheduler, _):
        with pytest.raises(StatusError) as failure:
            await run(mesh, deadline_seconds=-1.0)
        assert failure.value.code is Code.DEADLINE_EXCEEDED
        assert not scheduler.places


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_cancelling_ends_the_work_in_every_state(where: str) -> None:
    async with fleet(stall([1, 2] if where == "decode" else ()), limits=FAST) as (mesh, scheduler, workers):
        if where == "queue":
            scheduler.gate.clear()
        seen: asyncio.Queue[Any] = asyncio.Queue()

        async def consume() -> None:
            async with MeshCall(mesh, generation()) as call, aclosing(call.events()) as events:
                async for event in events:
                    seen.put_nowait(event)

        task = asyncio.create_task(consume())
        waits: dict[str, Callable[[], Any]] = {"queue": lambda: scheduler.places.until_length(1), "prefill": seen.get, "decode": seen.get}
        await waits[where]()
        if where == "decode":
            await seen.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if where == "queue":
            await scheduler.withdrawn.until_length(1)
            # The lease may have been on its way: it is ended too, at once.
            (finish,) = await scheduler.finishes.until_length(1)
            assert (finish.epoch, finish.finish_reason) == (1, types_pb2.FINISH_REASON_CANCELLED)
            return
        await workers[0].cancelled.until_length(1)
        (finish,) = await scheduler.finishes.until_length(1)
        assert finish.finish_reason == types_pb2.FINISH_REASON_CANCELLED
        assert finish.usage.completion_tokens == (2 if where == "decode" else 0)


async def test_choices_ended_here_are_cut_and_the_rest_goes_on() -> None:
    async with fleet(play([1, 2, 3, 4]), limits=FAST) as (mesh, scheduler, _):
        events = []
        async with MeshCall(mesh, generation(n=2)) as call, aclosing(call.events()) as stream:
            async for event in stream:
                events.append(event)
                if isinstance(event, worker_pb2.TokenDelta) and event.choice_index == 0 and event.first_position == 1:
                    call.end_choice(0, 2)
        assert ids_of(events, 0) == [1, 2]
        assert ids_of(events, 1) == [1, 2, 3, 4]
        (finish,) = await scheduler.finishes.until_length(1)
    assert finish.usage.completion_tokens == 6
    assert finish.finish_reason == STOP


async def test_finish_is_retried_until_a_scheduler_takes_it() -> None:
    worker = FakeWorker(play([1]))
    scheduler = FakeScheduler([worker])
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], FAST)
        async with MeshCall(mesh, generation()) as call, aclosing(call.events()) as events:
            async for _ in events:
                pass
            await scheduler.stop()
        assert not scheduler.finishes  # and nobody waited for it
        await scheduler.start(scheduler.address)
        await scheduler.finishes.until_length(1)
        await mesh.close()


async def test_channels_to_workers_that_left_are_closed() -> None:
    async with fleet(play([1]), play([1])) as (mesh, scheduler, workers):
        await run(mesh)
        await run(mesh)
        assert set(mesh.worker_addresses) == {worker.address for worker in workers}
        scheduler.workers = workers[:1]
        await mesh.fleet()
        assert mesh.worker_addresses == [workers[0].address]


async def test_two_looks_at_once_forget_each_worker_once() -> None:
    async with fleet(play([1]), play([1])) as (mesh, scheduler, _):
        await run(mesh)
        await run(mesh)
        scheduler.workers = []
        await asyncio.gather(mesh.fleet(), mesh.fleet())
        assert mesh.worker_addresses == []


async def test_drafts_are_counted_by_token_over_lost_workers_and_cuts() -> None:
    """Each delivered token counts once: not what a second worker repeats, nor what the gateway has cut."""

    async def loses(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([1, 2, 3], verdicts=bytes([0, 2, 1]))
        await call.fail(grpc.StatusCode.UNAVAILABLE)

    async def repeats(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens([3, 4, 5], first_position=2, verdicts=bytes([2, 2]))
        await call.tokens([6, 7], first_position=5, reason=LENGTH, verdicts=bytes([2, 2, 2, 2]))
        await call.complete()

    async with fleet(loses, repeats) as (mesh, _, _):
        call, events = await run(mesh)
    assert ids_of(events) == [1, 2, 3, 4, 5, 6, 7]
    assert (call.usage().accepted_tokens, call.usage().drafted_tokens) == (4, 5)
    call.end_choice(0, 4)
    assert (call.usage().accepted_tokens, call.usage().drafted_tokens, call.usage().completion_tokens) == (2, 3, 4)
