"""The engine's thread: what goes in, what comes out, and how one sees that it hangs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.errors import Code, StatusError
from services.worker import engine_loop
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineRequest, SamplingParams, TokenOutput
from services.worker.engine_loop import EngineLoop
from services.worker.sharing.device import SharedDevice
from services.worker.turn import Turn
from tests.worker_harness import VOCAB_SIZE, Clock, ToyRunner, continuation, until


class Collected:
    """A sink."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []
        self.error: StatusError | None = None

    def push(self, output: TokenOutput) -> None:
        self.outputs.append(output)

    def fail(self, error: StatusError) -> None:
        self.error = error

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def ended(self) -> bool:
        return self.error is not None or any(output.finish_reason for output in self.outputs)


class Running:
    """A loop on its thread, and all its turns."""

    def __init__(self) -> None:
        self.runner = ToyRunner()
        self.clock = Clock()
        self.turns: list[Turn] = []
        config = EngineConfig(block_size=4, num_blocks=16, max_sequences=4, max_step_tokens=8)
        self.engine = Engine(self.runner, config, vocab_size=VOCAB_SIZE, max_model_len=512)
        self.loop = EngineLoop(SharedDevice({"": self.engine}), clock=self.clock, observe=self.turns.append)

    def add(self, request_id: str, *, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5, n: int = 1) -> Collected:
        sink = Collected()
        self.loop.add(EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, seed=1), n=n), sink)
        return sink

    async def one_step(self) -> None:
        """From here on the loop knows how long steps are."""
        sink = self.add("first", max_tokens=1)
        await until(lambda: sink.ended)


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    self = Running()
    self.loop.start()
    try:
        yield self
    finally:
        self.runner.release()
        assert await self.loop.stop()


async def test_outputs_come_to_their_own_sinks() -> None:
    async with running() as self:
        sinks = [self.add(f"r{number}", prompt=(number, 2)) for number in range(3)]
        await until(lambda: all(sink.ended for sink in sinks))
        assert [sink.tokens for sink in sinks] == [continuation([number, 2], 5) for number in range(3)]
        assert self.loop.num_requests == 0


async def test_what_all_choices_get_in_a_step_comes_together() -> None:
    async with running() as self:
        self.runner.hold()
        sinks = [self.add(f"r{number}") for number in range(3)]
        self.runner.release()
        await until(lambda: all(sink.ended for sink in sinks))
        assert sum(len(turn.steps) for turn in self.turns) == self.runner.num_steps
        assert max(len(turn.outputs) for turn in self.turns) >= 3


async def test_first_and_last_words_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "TURN_SECONDS", 3600)  # nothing is collected for its age
    async with running() as self:
        self.runner.hold_at_output(1)
        sink = self.add("r", max_tokens=9)
        await until(lambda: len(sink.tokens) == 1)
        self.runner.release()
        await until(lambda: sink.ended)
        assert sink.tokens == continuation([1, 2, 3], 9)


async def test_what_a_long_step_brings_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "TURN_SECONDS", 3600)
    async with running() as self:
        self.runner.before_step = lambda: self.clock.forward(1801)
        self.runner.hold_at_output(3)
        sink = self.add("r", max_tokens=9)
        await until(lambda: len(sink.tokens) == 3)
        assert not sink.ended


async def test_what_short_steps_bring_is_collected_in_few_turns() -> None:
    async with running() as self:
        sink = self.add("r", max_tokens=60)
        await until(lambda: sink.ended)
        assert sink.tokens == continuation([1, 2, 3], 60)
        assert [output.first_position for turn in self.turns for output in turn.outputs] == list(range(60))
        assert sum(len(turn.steps) for turn in self.turns) == self.runner.num_steps
        assert max(len(turn.steps) for turn in self.turns) > 1


async def test_what_a_short_step_brings_does_not_wait_for_the_next() -> None:
    async with running() as self:
        self.runner.hold_at_output(3)
        sink = self.add("r", max_tokens=30)
        await until(lambda: len(sink.tokens) == 3)
        assert not sink.ended


async def test_without_work_the_thread_sleeps() -> None:
    async with running() as self:
        sink = self.add("r")
        await until(lambda: sink.ended)
        turns = len(self.turns)
        await asyncio.sleep(0.05)
        assert len(self.turns) == turns


async def test_an_abort_frees_the_blocks_and_silences_the_sink() -> None:
    async with running() as self:
        self.runner.hold_at_output(2)
        sink = self.add("r", max_tokens=30)
        await until(lambda: len(sink.tokens) == 2)
        assert self.loop.last_turn.stats[""].num_used_blocks > 0
        self.loop.abort("r")
        self.loop.abort("r")
        self.loop.abort("never there")
        self.runner.release()
        await until(lambda: self.loop.last_turn.stats[""].num_used_blocks == 0)
        assert len(sink.tokens) == 2
        self.engine.check_integrity()


async def test_late_news_of_an_ended_request_is_counted_and_ignored() -> None:
    async with running() as self:
        self.runner.hold()
        sink = self.add("r")
        await until(self.runner.held.is_set)
        self.loop.abort("r")
        self.runner.release()
        other = self.add("other")
        await until(lambda: other.ended)
        assert self.loop.num_stale_outputs == 1
        assert not sink.outputs
        assert len(other.tokens) == 5


async def test_what_can_never_fit_fails_alone() -> None:
    async with running() as self:
        big, small = self.add("big", prompt=(1,) * 80), self.add("small")
        await until(lambda: big.ended and small.ended)
        assert big.error is not None
        assert big.error.code is Code.INVALID_ARGUMENT
        assert "blocks" in big.error.message
        assert len(small.tokens) == 5


async def test_an_engine_failure_fails_every_request_and_all_that_follow() -> None:
    async with running() as self:
        self.runner.breaks_at_step = 3
        sinks = [self.add(f"r{number}") for number in range(3)]
        error = await asyncio.wait_for(asyncio.shield(self.loop.failed), 5)
        assert "the device is gone" in str(error)
        sinks.append(self.add("late"))
        assert [(sink.error.code, sink.error.reason) for sink in sinks if sink.error] == [(Code.INTERNAL, "ENGINE_FAILED")] * 4
        assert not self.loop.healthy


async def test_work_without_progress_for_eight_seconds_is_not_healthy() -> None:
    async with running() as self:
        await self.one_step()
        self.clock.now += 100
        assert self.loop.healthy, "idle is healthy"
        self.runner.hold()
        sink = self.add("r")
        self.clock.now += 7.9
        assert self.loop.healthy
        self.clock.now += 0.2
        assert not self.loop.healthy
        assert not self.loop.lost
        self.clock.now += 7
        assert self.loop.lost
        self.runner.release()
        await until(lambda: sink.ended)
        assert self.loop.healthy


async def test_the_first_step_may_take_longer() -> None:
    async with running() as self:
        self.runner.hold()
        self.add("r")
        self.clock.now += 59
        assert self.loop.healthy
        self.clock.now += 2
        assert not self.loop.healthy


async def test_where_steps_are_long_a_longer_one_is_no_stall() -> None:
    async with running() as self:
        self.runner.before_step = lambda: self.clock.forward(5)
        await self.one_step()
        self.runner.before_step = lambda: None
        self.runner.hold()
        self.add("r")
        self.clock.now += 19
        assert self.loop.healthy
        self.clock.now += 2
        assert not self.loop.healthy


async def test_steps_that_are_foretold_to_be_long_raise_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as self:
        monkeypatch.setattr(self.engine, "full_step_seconds", lambda: 3.0)
        assert self.loop.limit.seconds == 12


async def test_time_in_which_the_process_was_stopped_is_no_stall() -> None:
    async with running() as self:
        await self.one_step()
        self.runner.hold()
        self.add("r")
        self.clock.now += 20
        self.loop.forgive(19)
        assert self.loop.healthy
        self.loop.abort("r")


async def test_without_its_thread_a_loop_is_lost() -> None:
    loop = EngineLoop(Running().engine)
    assert not loop.lost, "not begun"
    loop.start()
    assert loop.healthy
    await loop.stop()
    loop._stopping = False  # it was not told to stop, but is gone
    await until(lambda: loop.lost)
    assert not loop.healthy


async def test_an_aborted_request_does_not_hide_a_hanging_step() -> None:
    async with running() as self:
        await self.one_step()
        self.runner.hold()
        self.add("r")
        self.loop.abort("r")
        self.clock.now += 11
        assert not self.loop.healthy


async def test_steps_that_compute_nothing_are_not_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as self:
        await self.one_step()
        steps: list[float] = []
        monkeypatch.setattr(self.engine, "step", lambda now: steps.append(now) or [])
        self.add("r")
        await until(lambda: len(steps) > 2)
        self.clock.now += 11
        await until(lambda: len(steps) > 5)
        assert not self.loop.healthy
        self.loop.abort("r")


async def test_a_long_prefill_is_progress_without_a_token() -> None:
    async with running() as self:
        self.runner.hold_at_step(4)
        self.add("r", prompt=(1,) * 50)
        for _ in range(3):
            self.clock.now += 4
        await until(lambda: sum(step.num_tokens for turn in self.turns for step in turn.steps) == 24)
        assert self.runner.num_steps == 3
        self.loop.abort("r")
