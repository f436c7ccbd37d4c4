"""Generate: what a gateway hears, and that a lease ends with its call in every state."""

import asyncio
import random

import grpc
import pytest

from forebay.v1 import scheduler_pb2, types_pb2
from services.common.errors import from_rpc
from services.worker.engine.batch import Batch
from services.worker.outbox import Pace
from tests.worker_harness import Harness, continuation, hear, serving, until

PROMPT = [5, 6, 7]


async def refused(worker: Harness, code: grpc.StatusCode, request: object, timeout: float | None = None) -> str:
    """Asserts that a request fails with this code; answers the machine-readable reason."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hear(worker.stub.Generate(request, timeout=timeout))
    assert caught.value.code() is code, caught.value.details()
    return from_rpc(caught.value).reason


async def test_a_stream_is_accepted_then_deltas_then_completed() -> None:
    async with serving() as worker:
        heard = await hear(worker.stub.Generate(worker.request(prompt=PROMPT, max_tokens=20)))
        assert heard.kinds[0] == "accepted"
        assert heard.kinds[-1] == "completed"
        assert set(heard.kinds[1:-1]) == {"deltas"}
        assert heard.events[0].accepted.fingerprint == "toy"
        assert heard.tokens() == continuation(PROMPT, 20)
        assert [delta.finish_reason for delta in heard.deltas if delta.finish_reason] == [types_pb2.FINISH_REASON_LENGTH]
        assert heard.deltas[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert heard.events[-1].completed.usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=20)
        await worker.idle()


async def test_choices_are_coalesced_into_one_message() -> None:
    async with serving(pace=Pace(delta_seconds=0.05)) as worker:
        heard = await hear(worker.stub.Generate(worker.request(prompt=PROMPT, n=4, max_tokens=30)))
        for choice in range(4):
            assert heard.tokens(choice) == continuation(PROMPT, 30, choice)
        # 4 x 30 tokens: a first message per choice at most, then one per 50 ms.
        assert heard.kinds.count("deltas") <= 4 + 6
        assert heard.events[-1].completed.usage.completion_tokens == 120


async def test_delivered_output_is_counted_and_not_sent_again() -> None:
    async with serving() as worker:
        whole = continuation(PROMPT, 8)
        request = worker.request(prompt=PROMPT, epoch=2, delivered=[types_pb2.TokenIds(ids=whole[:5])])
        heard = await hear(worker.stub.Generate(request))
        assert heard.tokens() == whole[5:]
        assert heard.deltas[0].first_position == 5
        assert heard.events[-1].completed.usage.completion_tokens == 8


async def test_a_silent_stream_pings_and_says_whether_it_waits() -> None:
    async with serving(pace=Pace(ping_seconds=0.01)) as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request())
        events = [await call.read() for _ in range(4)]
        assert [event.WhichOneof("event") for event in events] == ["accepted", "ping", "ping", "ping"]
        assert events[-1].ping.waiting
        worker.runner.release()
        assert (await hear(call)).tokens() == continuation([1, 2, 3], 8)


@pytest.mark.parametrize("step", [1, 4, 20])
async def test_cancelling_frees_the_blocks_in_every_state(step: int) -> None:
    """Held before anything, in the prefill (10 steps of 4 tokens) and while it decodes; a second request waits for the slot."""
    async with serving(max_sequences=1, max_step_tokens=4) as worker:
        worker.runner.hold_at_step(step)
        calls = [worker.stub.Generate(worker.request(f"r{i}", prompt=list(range(40)), max_tokens=100)) for i in range(2)]
        for call in calls:
            await call.read()
        await until(lambda: worker.runner.num_steps == step - 1)
        for call in calls:
            call.cancel()
        await until(lambda: not len(worker.worker.leases))
        worker.runner.release()
        await worker.idle(0.5)
        assert worker.runner.num_steps <= step


async def test_a_cancelled_call_is_over_even_while_its_step_hangs() -> None:
    async with serving() as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request(max_tokens=200))
        await call.read()
        call.cancel()
        await until(lambda: not len(worker.worker.leases))
        worker.runner.release()
        await worker.idle()
        assert worker.runner.num_steps <= 2


async def test_the_deadline_ends_the_request() -> None:
    async with serving() as worker:
        worker.runner.hold()
        await refused(worker, grpc.StatusCode.DEADLINE_EXCEEDED, worker.request(), timeout=0.05)
        await until(lambda: not len(worker.worker.leases))
        worker.runner.release()
        await worker.idle()


async def test_a_deadline_in_the_past_starts_no_work() -> None:
    async with serving() as worker:
        await refused(worker, grpc.StatusCode.DEADLINE_EXCEEDED, worker.request(), timeout=0)
        assert worker.runner.num_steps == 0
        await worker.idle()


@pytest.mark.parametrize("epoch", [1, 2])
async def test_a_stale_or_equal_epoch_is_refused_while_it_runs_and_after(epoch: int) -> None:
    async with serving() as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request(epoch=2))
        await call.read()
        assert await refused(worker, grpc.StatusCode.FAILED_PRECONDITION, worker.request(epoch=epoch)) == "STALE_EPOCH"
        worker.runner.release()
        await hear(call)
        assert await refused(worker, grpc.StatusCode.FAILED_PRECONDITION, worker.request(epoch=epoch)) == "STALE_EPOCH"


async def test_a_higher_epoch_takes_over() -> None:
    async with serving() as worker:
        worker.runner.hold()
        old = worker.stub.Generate(worker.request())
        await old.read()
        new = worker.stub.Generate(worker.request(epoch=2))
        await new.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(old)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        worker.runner.release()
        assert (await hear(new)).tokens() == continuation([1, 2, 3], 8)
        await worker.idle()


async def test_what_is_meant_for_another_start_or_model_is_refused() -> None:
    async with serving() as worker:
        assert await refused(worker, grpc.StatusCode.FAILED_PRECONDITION, worker.request(incarnation="old")) == "STALE_INCARNATION"
        assert await refused(worker, grpc.StatusCode.NOT_FOUND, worker.request(model="other@fp32")) == "MODEL_NOT_FOUND"
        assert await refused(worker, grpc.StatusCode.FAILED_PRECONDITION, worker.request(model_version="x")) == "MODEL_VERSION"
        assert await refused(worker, grpc.StatusCode.INVALID_ARGUMENT, worker.request(prompt=[5000])) == "INVALID_FIELD"
        await worker.idle()


async def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    async with serving(num_blocks=8) as worker:  # 32 tokens of cache
        small = [asyncio.create_task(hear(worker.stub.Generate(worker.request(f"s{i}")))) for i in range(6)]
        assert await refused(worker, grpc.StatusCode.INVALID_ARGUMENT, worker.request("big", prompt=[1] * 40)) == "INVALID_FIELD"
        for heard in await asyncio.gather(*small):
            assert len(heard.tokens()) == 8
        await worker.idle()


async def test_two_may_wait_beyond_the_slots_and_no_more() -> None:
    async with serving(max_sequences=2) as worker:
        worker.runner.hold()
        calls = [worker.stub.Generate(worker.request(f"r{i}")) for i in range(4)]
        for call in calls:
            await call.read()
        assert await refused(worker, grpc.StatusCode.RESOURCE_EXHAUSTED, worker.request("more")) == "NO_ROOM"
        # Realtime work preempts the others, so it doesn't wait for them.
        calls.append(worker.stub.Generate(worker.request("now", latency_class=types_pb2.LATENCY_CLASS_REALTIME)))
        await calls[-1].read()
        worker.runner.release()
        await asyncio.gather(*map(hear, calls))
        await worker.idle()
        assert await worker.metric("forebay_worker_refused_requests_total") == 1


async def test_realtime_takes_a_slot_from_batch_whose_stream_pauses_and_goes_on() -> None:
    def is_urgent(batch: Batch) -> bool:
        return any(span.sequence.latency_class == 1 and span.sequence.num_output_tokens == 2 for span in batch.spans)

    async with serving(max_sequences=2, swap_blocks=8) as worker:
        worker.runner.hold()
        batch = [worker.stub.Generate(worker.request(f"r{i}", latency_class=3, max_tokens=30)) for i in range(2)]
        for call in batch:
            await call.read()
        await until(worker.runner.held.is_set)
        worker.runner.hold_later(lambda batch: all(span.sequence.num_output_tokens >= 3 for span in batch.spans))
        await until(worker.runner.held.is_set)
        urgent = worker.stub.Generate(worker.request("now", latency_class=1, max_tokens=4))
        await urgent.read()
        worker.runner.hold_later(is_urgent)
        await until(worker.runner.held.is_set)
        heartbeat = worker.worker.heartbeat()
        assert [(usage.latency_class, usage.num_slots) for usage in heartbeat.class_usage] == [(1, 1), (3, 2)], (
            "one pauses, and has its place"
        )
        blocks = {lease.request_id: lease.num_blocks for lease in heartbeat.leases}
        assert blocks.pop("now") == heartbeat.class_usage[0].num_blocks > 0
        assert min(blocks.values()) == 0 < max(blocks.values()) == heartbeat.class_usage[1].num_blocks
        worker.runner.release()
        assert (await hear(urgent)).tokens() == continuation([1, 2, 3], 4)
        heard = await asyncio.gather(*map(hear, batch))
        assert [h.tokens() for h in heard] == [continuation([1, 2, 3], 30)] * 2
        assert sorted(h.events[-1].completed.usage.preemptions for h in heard) == [0, 1]
        await worker.idle()
        names = ("class_preemptions", "capacity_preemptions", "swaps")
        assert [await worker.metric(f"forebay_worker_{name}_total") for name in names] == [1, 0, 1]
        assert await worker.metric("forebay_worker_swapped_blocks_total") > 0
        assert await worker.metric("forebay_worker_swapped_tokens_total") > 0
        assert await worker.metric("forebay_worker_step_time_error") == 0, "no time passes"


async def test_two_may_wait_for_blocks_and_no_more() -> None:
    async with serving(num_blocks=16) as worker:
        holder = worker.stub.Generate(worker.request("holder", prompt=list(range(60)), max_tokens=1))
        worker.runner.hold()
        await holder.read()
        calls = [worker.stub.Generate(worker.request(f"r{i}", prompt=[i] * 30)) for i in range(2)]
        for call in calls:
            await call.read()
        assert await refused(worker, grpc.StatusCode.RESOURCE_EXHAUSTED, worker.request("more", prompt=[9] * 30)) == "NO_ROOM"
        worker.runner.release()
        await asyncio.gather(*map(hear, [holder, *calls]))


async def test_a_request_wider_than_the_slots_runs_when_it_is_alone() -> None:
    async with serving(max_sequences=2) as worker:
        heard = await hear(worker.stub.Generate(worker.request(n=8)))
        assert [heard.tokens(choice) for choice in range(8)] == [continuation([1, 2, 3], 8, choice) for choice in range(8)]


async def test_a_revoked_lease_ends_and_cannot_come_back() -> None:
    async with serving() as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request(epoch=3))
        await call.read()
        revoke = worker.worker.leases.revoke
        revoke([scheduler_pb2.LeaseProgress(request_id="r", epoch=2)])
        assert len(worker.worker.leases) == 1
        revoke([scheduler_pb2.LeaseProgress(request_id="r", epoch=3), scheduler_pb2.LeaseProgress(request_id="coming", epoch=1)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(call)
        assert from_rpc(caught.value).reason == "REVOKED"
        assert await refused(worker, grpc.StatusCode.FAILED_PRECONDITION, worker.request("coming")) == "STALE_EPOCH"
        worker.runner.release()
        await worker.idle()


async def test_one_requests_failure_leaves_the_others_alone() -> None:
    async with serving() as worker:
        worker.runner.failing.add(("bad", 10))
        others = [asyncio.create_task(hear(worker.stub.Generate(worker.request(f"r{i}", max_tokens=40)))) for i in range(5)]
        assert await refused(worker, grpc.StatusCode.INTERNAL, worker.request("bad", max_tokens=40, n=2)) == "SEQUENCE_FAILED"
        for heard in await asyncio.gather(*others):
            assert heard.tokens() == continuation([1, 2, 3], 40)
            assert heard.kinds[-1] == "completed"
        await worker.idle()
        assert await worker.metric("vllm:request_success_total", finished_reason="error") == 1
        assert await worker.metric("vllm:request_success_total", finished_reason="length") == 5


async def test_a_reader_that_takes_nothing_is_given_up() -> None:
    async with serving(num_blocks=1024, pace=Pace(delta_seconds=0, write_seconds=0.05, message_bytes=64 << 10)) as worker:
        top = {"logprobs": 20, "max_tokens": 400, "n": 8}
        call = worker.stub.Generate(worker.request(**top))
        await call.read()
        await until(lambda: not len(worker.worker.leases))
        call.cancel()
        await worker.idle()


async def test_random_cancels_leave_nothing_behind() -> None:
    draw = random.Random(7)
    async with serving(num_blocks=32, max_sequences=4, max_step_tokens=8) as worker:

        async def one(number: int) -> None:
            prompt = [draw.randrange(900) for _ in range(draw.randrange(1, 30))]
            call = worker.stub.Generate(
                worker.request(f"r{number}", prompt=prompt, max_tokens=draw.randrange(1, 40), n=draw.choice([1, 1, 3]))
            )
            reading = asyncio.ensure_future(hear(call))
            await asyncio.wait({reading}, timeout=draw.random() * 0.05)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        for start in range(0, 300, 10):
            await asyncio.gather(*(one(number) for number in range(start, start + 10)))
        await worker.idle(0.5)
        assert not worker.worker.loop.failed.done()
        assert worker.worker.loop.num_requests == 0
