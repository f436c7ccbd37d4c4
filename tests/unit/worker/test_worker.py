"""A worker as a whole: readiness, health, drain, fatal errors, metrics."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forebay.v1 import types_pb2
from services.common import rpc
from services.common.errors import from_rpc
from services.worker.engine.sequence import Sequence
from services.worker.wire import step_time_model
from services.worker.worker import SERVICE_NAME, EngineFailed
from tests.drafters import Guesser, always
from tests.worker_harness import Clock, Harness, continuation, hear, serving, toy_token, until

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


async def health(worker: Harness, service: str = "") -> int:
    async with rpc.channel(worker.worker.address) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_health(worker: Harness, wanted: int) -> None:
    async with asyncio.timeout(20):
        while await health(worker, SERVICE_NAME) != wanted:  # noqa: ASYNC110  # a health check is asked again and again
            await asyncio.sleep(0.01)


async def test_a_fresh_worker_is_ready() -> None:
    async with serving() as worker:
        assert (await worker.http.get("/ready")).status_code == 200
        assert (await worker.http.get("/health")).status_code == 200
        await until_health(worker, health_pb2.HealthCheckResponse.SERVING)
        assert await health(worker) == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_without_its_scheduler_is_not_ready() -> None:
    async with serving(schedulers="127.0.0.1:1") as worker:
        answer = await worker.http.get("/ready")
        assert (answer.status_code, answer.text) == (503, "not ready: no scheduler has been reached\n")


async def test_a_hanging_step_loop_sends_its_streams_elsewhere_and_then_ends_the_process() -> None:
    clock = Clock()
    async with serving(clock=clock) as worker:
        await hear(worker.stub.Generate(worker.request("first")))
        await until_health(worker, health_pb2.HealthCheckResponse.SERVING)
        worker.runner.hold()
        call = worker.stub.Generate(worker.request())
        await call.read()
        clock.now += 9
        assert (await worker.http.get("/ready")).status_code == 503
        assert "no progress for 9 s (limit 8)" in (await worker.http.get("/health")).text
        assert not worker.worker.heartbeat().healthy
        await until_health(worker, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await worker.metric("forebay_worker_step_loop_healthy") == 0
        for stream in (call, worker.stub.Generate(worker.request("late"))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await hear(stream)
            assert (caught.value.code(), from_rpc(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_HANGS")
        clock.now += 7
        with pytest.raises(EngineFailed, match="no progress"):
            await asyncio.wait_for(worker.worker.until(asyncio.Event()), 5)


async def test_a_step_loop_that_comes_back_takes_work_again() -> None:
    clock = Clock()
    async with serving(clock=clock) as worker:
        await hear(worker.stub.Generate(worker.request("first")))
        worker.runner.hold()
        call = worker.stub.Generate(worker.request("hangs"))
        await call.read()
        clock.now += 9
        with pytest.raises(grpc.aio.AioRpcError):
            await hear(call)
        worker.runner.release()
        await until_health(worker, health_pb2.HealthCheckResponse.SERVING)
        assert (await hear(worker.stub.Generate(worker.request("after")))).tokens() == continuation([1, 2, 3], 8)
        await worker.idle()


async def test_an_engine_failure_reaches_every_client_and_ends_the_process() -> None:
    async with serving() as worker:
        worker.runner.breaks_at_step = 4
        worker.runner.hold_at_step(2)
        calls = [worker.stub.Generate(worker.request(f"r{number}", max_tokens=50)) for number in range(4)]
        for call in calls:
            await call.read()
        worker.runner.release()
        with pytest.raises(EngineFailed, match="the device is gone"):
            await asyncio.wait_for(worker.worker.until(asyncio.Event()), 5)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await hear(call)
            assert (caught.value.code(), from_rpc(caught.value).reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAILED")
        assert (await worker.http.get("/health")).status_code == 503


async def test_a_drain_lets_what_runs_go_on_and_takes_nothing_new() -> None:
    async with serving() as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request())
        await call.read()
        draining = asyncio.create_task(worker.worker.drain(30))
        await until(lambda: worker.worker.leases.draining)
        assert worker.worker.heartbeat().draining
        assert (await worker.http.get("/ready")).text == "not ready: draining\n"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(worker.stub.Generate(worker.request("late")))
        assert (caught.value.code(), from_rpc(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await until_health(worker, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not draining.done()
        worker.runner.release()
        assert (await hear(call)).tokens() == continuation([1, 2, 3], 8)
        await asyncio.wait_for(draining, 5)


async def test_what_outlasts_a_drain_is_told_to_go_elsewhere() -> None:
    async with serving() as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request())
        await call.read()
        await worker.worker.drain(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(call)
        assert (caught.value.code(), from_rpc(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINED")


async def test_a_worker_put_back_into_service_takes_work_and_ends_none() -> None:
    async with serving() as worker:
        worker.runner.hold()
        call = worker.stub.Generate(worker.request())
        await call.read()
        worker.worker.set_drained(True)
        await until_health(worker, health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(worker.stub.Generate(worker.request("late")))
        assert from_rpc(caught.value).reason == "DRAINING"
        worker.worker.set_drained(False)
        await until_health(worker, health_pb2.HealthCheckResponse.SERVING)
        worker.runner.release()
        assert (await hear(call)).tokens() == continuation([1, 2, 3], 8)
        assert (await hear(worker.stub.Generate(worker.request("after")))).tokens() == continuation([1, 2, 3], 8)


async def test_a_worker_that_is_about_to_go_is_not_put_back() -> None:
    async with serving() as worker:
        stop = asyncio.Event()
        stop.set()
        worker.worker.set_drained(True)
        await worker.worker.until(stop)
        await worker.worker.drain(1)
        worker.worker.set_drained(False)
        assert worker.worker.heartbeat().draining


async def test_a_stop_signal_ends_the_service() -> None:
    async with serving() as worker:
        stop = asyncio.Event()
        serving_on = asyncio.create_task(worker.worker.until(stop))
        await asyncio.sleep(0)
        stop.set()
        await asyncio.wait_for(serving_on, 1)


async def test_metrics_have_the_names_that_dashboards_ask_for() -> None:
    async with serving() as worker:
        model = {"model_name": "toy@fp32"}
        prompt = list(range(20))
        for number in range(2):
            await hear(worker.stub.Generate(worker.request(f"r{number}", prompt=prompt, max_tokens=6, n=2)))
        await worker.idle()
        metric = worker.metric
        assert await metric("vllm:num_requests_running", **model) == 0
        assert await metric("vllm:num_requests_waiting", **model) == 0
        assert await metric("vllm:kv_cache_usage_perc", **model) == 0
        assert await metric("vllm:prompt_tokens_total", **model) == 40
        assert await metric("vllm:generation_tokens_total", **model) == 24
        assert await metric("vllm:prefix_cache_queries_total", **model) >= 40
        assert await metric("vllm:prefix_cache_hits_total", **model) >= 16
        assert await metric("vllm:external_prefix_cache_queries_total", **model) == 0
        assert await metric("vllm:external_prefix_cache_hits_total", **model) == 0
        assert await metric("forebay_worker_host_cache_usage", **model) == 0
        assert await metric("vllm:num_preemptions_total", **model) == 0
        assert await metric("vllm:request_success_total", finished_reason="length", **model) == 2
        assert await metric("vllm:request_success_total", finished_reason="abort", **model) == 0
        assert await metric("vllm:time_to_first_token_seconds_count", **model) == 2
        await metric("vllm:time_to_first_token_seconds_bucket", le="0.06", **model)  # a bound of vLLM's own
        assert await metric("vllm:time_to_first_token_seconds_bucket", le="+Inf", **model) == 2
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            assert await metric(f"vllm:{name}_count", **model) == 20
        assert await metric("vllm:e2e_request_latency_seconds_count", **model) == 2
        assert await metric("vllm:request_prompt_tokens_sum", **model) == 40
        assert await metric("vllm:request_generation_tokens_sum", **model) == 24
        assert await metric("vllm:request_params_n_sum", **model) == 4
        assert await metric("vllm:request_params_max_tokens_sum", **model) == 12
        assert await metric("vllm:iteration_tokens_total_count", **model) == worker.runner.num_steps


async def test_a_request_is_taken_apart_into_its_times_and_counts() -> None:
    async with serving() as worker:
        prompt = list(range(20))
        for number in range(2):
            await hear(worker.stub.Generate(worker.request(f"r{number}", prompt=prompt, max_tokens=6)))
        await worker.idle()
        metric = worker.metric
        for name in ("queue", "prefill", "decode", "inference"):
            assert await metric(f"vllm:request_{name}_time_seconds_count") == 2
        whole = await metric("vllm:e2e_request_latency_seconds_sum")
        parts = [await metric(f"vllm:request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
        assert sum(parts) <= whole
        assert await metric("vllm:request_time_per_output_token_seconds_count") == 2
        assert await metric("vllm:request_max_num_generation_tokens_sum") == 12
        assert await metric("vllm:request_num_preemptions_sum") == 0
        assert await metric("vllm:request_prefill_kv_computed_tokens_sum") == 20 + 4
        by_source = {source: await metric("vllm:prompt_tokens_by_source_total", source=source) for source in SOURCES}
        assert by_source == {"local_compute": 24, "local_cache_hit": 16, "external_kv_transfer": 0}
        assert await metric("vllm:prompt_tokens_cached_by_source_total", source="device") == 16
        assert await metric("forebay_worker_steps_total") == worker.runner.num_steps
        assert await metric("forebay_worker_theta_max") > 0
        assert await metric("forebay_worker_theta_share") > 0


@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_from_before_a_move_are_not_this_workers(n: int) -> None:
    async with serving() as worker:
        delivered = [types_pb2.TokenIds(ids=continuation([5, 6, 7], 8, choice)[:5]) for choice in range(n)]
        await hear(worker.stub.Generate(worker.request(prompt=[5, 6, 7], epoch=2, n=n, delivered=delivered)))
        await worker.idle()
        assert await worker.metric("vllm:request_generation_tokens_sum") == 3 * n
        assert await worker.metric("vllm:request_max_num_generation_tokens_sum") == 3


async def test_what_the_host_gives_back_is_in_usage_and_metrics() -> None:
    """Two prompts of 5 blocks in turn, on a device of 7 blocks."""
    async with serving(num_blocks=7, host_blocks=12) as worker:
        for number in range(4):
            prompt = list(range(100 * (number % 2), 100 * (number % 2) + 20))
            heard = await hear(worker.stub.Generate(worker.request(f"r{number}", prompt=prompt, max_tokens=2)))
            assert heard.events[-1].completed.usage.cached_tokens == (16 if number >= 2 else 0)
        await worker.idle()
        model = {"model_name": "toy@fp32"}
        hits = await worker.metric("vllm:external_prefix_cache_hits_total", **model)
        assert hits == 2 * 16 - await worker.metric("vllm:prefix_cache_hits_total", **model) > 0
        assert await worker.metric("vllm:external_prefix_cache_queries_total", **model) == 4 * 20 - (2 * 16 - hits)
        assert await worker.metric("forebay_worker_copied_in_blocks_total", **model) == hits / 4
        held = await worker.metric("forebay_worker_host_cache_usage", **model)
        assert held * 12 == await worker.metric("forebay_worker_copied_out_blocks_total", **model)
        assert 0 < held <= 1


async def test_prefix_hits_are_in_the_usage() -> None:
    async with serving() as worker:
        prompt = list(range(20))
        first = await hear(worker.stub.Generate(worker.request("r1", prompt=prompt)))
        second = await hear(worker.stub.Generate(worker.request("r2", prompt=prompt)))
        assert first.events[-1].completed.usage.cached_tokens == 0
        assert second.events[-1].completed.usage.cached_tokens == 16
        other = await hear(worker.stub.Generate(worker.request("r3", prompt=prompt, cache_salt=b"t" * 32)))
        assert other.events[-1].completed.usage.cached_tokens == 0


async def test_drafts_show_in_deltas_usage_and_metrics_and_in_no_token() -> None:
    """A drafter that is right but for every sixth token; a request that wants none has none."""

    def guess(sequence: Sequence, drafted: tuple[int, ...]) -> int:
        return toy_token(sequence, drafted) if (sequence.num_output_tokens + len(drafted)) % 6 else 0

    async with serving(speculator=always(3, Guesser(guess))) as worker:
        heard = await hear(worker.stub.Generate(worker.request("r1", prompt=[5, 6], max_tokens=30, n=2, logprobs=1)))
        without = await hear(worker.stub.Generate(worker.request("r2", prompt=[5, 6], max_tokens=30, n=2, speculation=False)))
        await worker.idle()
        for choice in range(2):
            assert heard.tokens(choice) == without.tokens(choice) == continuation([5, 6], 30, choice)
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in heard.deltas)
        verdicts = b"".join(delta.verdicts.ljust(len(delta.token_ids), b"\0") for delta in heard.deltas)
        assert len(verdicts) == 60
        usage = heard.events[-1].completed.usage
        assert usage.accepted_tokens == verdicts.count(2) > 20
        assert usage.drafted_tokens == verdicts.count(1) + verdicts.count(2) > usage.accepted_tokens
        assert without.events[-1].completed.usage.drafted_tokens == 0
        assert not any(delta.verdicts for delta in without.deltas)
        assert await worker.metric("vllm:spec_decode_num_accepted_tokens_total") == usage.accepted_tokens
        positions = [await worker.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
        assert sum(positions) == usage.accepted_tokens
        assert positions == sorted(positions, reverse=True)
        assert await worker.metric("vllm:spec_decode_num_drafts_total") <= await worker.metric("vllm:spec_decode_num_draft_tokens_total")


async def test_heartbeats_tell_what_is_still_to_be_computed() -> None:
    clock = Clock()
    async with serving(clock=clock, max_sequences=2, max_step_tokens=16) as worker:
        cold = worker.worker.heartbeat()
        assert not cold.HasField("step_time")
        assert cold.num_prefill_tokens == 0
        worker.runner.hold_later(lambda batch: batch.spans[0].start == 32)
        call = worker.stub.Generate(worker.request("long", prompt=list(range(60)), max_tokens=2))
        await until(worker.runner.held.is_set)
        await until(lambda: worker.worker.heartbeat().num_prefill_tokens == 28)
        worker.runner.release()
        await hear(call)
        await until(lambda: worker.worker.heartbeat().num_prefill_tokens == 0)
        assert worker.worker._register().max_step_tokens == 16
        assert worker.worker._register().capacity.memory_bytes > 0


def test_a_fitted_step_time_goes_onto_the_wire_by_name() -> None:
    model = step_time_model((4.0, 3.0, 2.0, 1.0))
    assert (model.fixed_seconds, model.token_seconds, model.row_seconds, model.key_seconds) == (4.0, 3.0, 2.0, 1.0)
