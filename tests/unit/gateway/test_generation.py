"""From the mesh's tokens to safe text: stops, echo, log-probabilities, usage, and one end whatever happens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from forebay.v1 import inference_pb2, types_pb2
from services.common.errors import Code, StatusError
from services.gateway.generation import Event, Generations
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics
from services.gateway.text.stream import TextStream
from tests.fakes import LENGTH, STOP, FakeScheduler, FakeWorker, Script, WorkerCall, play, serving, stall
from tests.unit.gateway.build import EOS, FAST, generation, letters, text_of


@asynccontextmanager
async def generations(script: Script) -> AsyncIterator[tuple[Generations, FakeScheduler, FakeWorker, CollectorRegistry]]:
    worker = FakeWorker(script)
    scheduler, registry = FakeScheduler([worker]), CollectorRegistry()
    async with serving(worker, scheduler):
        mesh = Mesh([scheduler.address], FAST)
        try:
            yield Generations(mesh, GatewayMetrics(registry), "grpc"), scheduler, worker, registry
        finally:
            await mesh.close()


async def events_of(script: Script, **fields: Any) -> list[Event]:
    async with generations(script) as (runs, *_), aclosing(runs.run(generation(**fields))) as events:
        return [event async for event in events]


def ids_of(events: list[Event], choice: int = 0) -> list[int]:
    return [i for event in events if isinstance(event, inference_pb2.Delta) and event.choice_index == choice for i in event.token_ids]


async def test_started_first_finished_last_each_once() -> None:
    events = await events_of(play(letters("abc"), cached_tokens=1), prompt=[9, 9], seed=42)
    assert [type(event).__name__ for event in events] == ["Started", "Delta", "Delta", "Delta", "Finished"]
    started, finished = events[0], events[-1]
    assert isinstance(started, inference_pb2.Started)
    assert (started.model, started.prompt_tokens, started.seed, started.system_fingerprint) == ("tiny@fp32", 2, 42, "fp32-test")
    assert isinstance(finished, inference_pb2.Finished)
    assert list(finished.reasons) == [LENGTH]
    assert finished.usage == types_pb2.Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)


async def test_the_token_that_stopped_the_engine_is_counted_and_no_text() -> None:
    events = await events_of(play(letters("ab!"), reason=STOP), stop_token_ids=(ord("!"),))
    assert text_of(events) == "ab"
    assert ids_of(events) == letters("ab!")
    events = await events_of(play([*letters("ab"), EOS], reason=STOP))
    assert text_of(events) == "ab"
    finished = events[-1]
    assert isinstance(finished, inference_pb2.Finished)
    assert finished.usage.completion_tokens == 3


async def test_an_answer_cut_at_a_stop_string_still_tells_its_cache_hits() -> None:
    events = await events_of(play(letters("a.bcdefgh"), cached_tokens=1), prompt=[9, 9], stop=(".",))
    finished = events[-1]
    assert isinstance(finished, inference_pb2.Finished)
    assert finished.usage == types_pb2.Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=1)


async def test_half_a_character_is_flushed_once_at_a_forced_end() -> None:
    events = await events_of(play("ab😀".encode()[:4]))
    assert text_of(events) == "ab\ufffd"


async def test_a_choice_stopped_by_text_waits_for_the_others_and_keeps_its_cut() -> None:
    async def script(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("one. more"), 0)
        await call.tokens(letters("two"), 1)
        await call.tokens(letters(" and more"), 0)
        await call.tokens(letters(" three"), 1, LENGTH)
        await call.tokens(letters("x"), 0, LENGTH)
        await call.complete()

    async with generations(script) as (runs, scheduler, _, registry), aclosing(runs.run(generation(n=2, stop=(". ",)))) as stream:
        events = [event async for event in stream]
        await scheduler.finishes.until_length(1)
    assert text_of(events, 0) == "one"
    assert ids_of(events, 0) == letters("one. ")
    assert text_of(events, 1) == "two three"
    finished = events[-1]
    assert isinstance(finished, inference_pb2.Finished)
    assert list(finished.reasons) == [STOP, LENGTH]
    assert finished.usage.completion_tokens == 5 + 9
    labels = {"face": "grpc", "model": "tiny", "latency_class": "standard"}
    assert registry.get_sample_value("forebay_overrun_tokens_total", labels) == len("more") + len(" and more")
    assert registry.get_sample_value("forebay_output_tokens_total", labels) == 14
    assert registry.get_sample_value("forebay_time_to_first_token_seconds_count", labels) == 1
    assert registry.get_sample_value("forebay_requests_total", labels | {"status": "OK"}) == 1


async def test_echo_puts_the_prompt_before_every_choice() -> None:
    events = await events_of(play(letters("!")), prompt=letters("hé"), echo=True, n=2)
    assert [text_of(events, choice) for choice in (0, 1)] == ["hé!", "hé!"]


async def test_scoring_delivers_prompt_logprobs_and_no_token() -> None:
    async def scores(call: WorkerCall) -> None:
        assert call.request.sampling.max_tokens == 0
        await call.accept()
        await call.prompt_logprobs(piece=2)
        await call.tokens([], reason=LENGTH)
        await call.complete()

    events = await events_of(scores, prompt=letters("abc"), echo=True, max_tokens=0, prompt_logprobs=1)
    entries = [entry for event in events[1:-1] for entry in event.prompt_logprobs]  # type: ignore[union-attr]
    assert [entry.chosen.text for entry in entries] == ["a", "b", "c"]
    assert [entry.has_logprob for entry in entries] == [False, True, True]
    assert entries[1].top[0].text_bytes == b"b"
    finished = events[-1]
    assert isinstance(finished, inference_pb2.Finished)
    assert finished.usage.completion_tokens == 0


async def test_our_own_bug_is_a_typed_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with generations(play(letters("abc"))) as (runs, scheduler, _, registry):
        monkeypatch.setattr(TextStream, "push", lambda *_: 1 / 0)

        async def read() -> None:
            async with aclosing(runs.run(generation())) as events:
                async for _ in events:
                    pass

        with pytest.raises(StatusError) as failure:
            await read()
        assert failure.value.code is Code.INTERNAL
        assert "division" not in failure.value.message
        (finish,) = await scheduler.finishes.until_length(1)
        assert finish.status_code == Code.INTERNAL.value[0]
        assert registry.get_sample_value("forebay_requests_in_flight", {"face": "grpc"}) == 0


async def test_closing_the_events_cancels_the_work() -> None:
    async with generations(stall(letters("a"))) as (runs, scheduler, worker, registry):
        async with aclosing(runs.run(generation())) as events:
            async for event in events:
                if isinstance(event, inference_pb2.Delta):
                    break
        await worker.cancelled.until_length(1)
        (finish,) = await scheduler.finishes.until_length(1)
        assert finish.finish_reason == types_pb2.FINISH_REASON_CANCELLED
        assert finish.usage.completion_tokens == 1
        labels = {"face": "grpc", "model": "tiny", "latency_class": "standard", "status": "CANCELLED"}
        assert registry.get_sample_value("forebay_requests_total", labels) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.text("ab c", min_size=1, max_size=30),
    stop=st.text("ab c", min_size=1, max_size=4),
    pieces=st.integers(1, 9),
    cut=st.integers(0, 30),
)
def test_b04_any_split_and_any_failover_give_the_same_text(text: str, stop: str, pieces: int, cut: int) -> None:
    ids = letters(text)

    async def dies_once(call: WorkerCall) -> None:
        if call.request.epoch == 1 and cut < len(ids):
            await call.accept()
            await call.tokens(ids[:cut])
            await call.fail(Code.ABORTED)
        await play(ids, per_message=pieces)(call)

    events = asyncio.run(events_of(dies_once, stop=(stop,)))
    end = text.find(stop)
    assert text_of(events) == (text if end < 0 else text[:end])
    assert ids_of(events) == (ids if end < 0 else ids[: end + len(stop)])
