"""The only thread of a worker: it steps the device's engines. Knows no RPC.

Commands go in through a queue; what steps bring comes out in turns, one wake-up of the event loop each (DESIGN 8.11).
Everything public is called on the event loop; what the thread runs is marked so.
"""

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.common import log
from services.common.errors import Code, StatusError
from services.worker.engine.request import InvalidRequest, RequestTooLarge
from services.worker.sharing.device import Output, Request, SharedDevice
from services.worker.turn import Step, StepWindow, Turn, joined
from services.worker.watchdog import Limit

SWITCH_INTERVAL_SECONDS = 0.0005
"""How long the engine thread may keep the event loop from the interpreter; Python's default of 5 ms would show in every token's latency."""

IDLE_STEP_SECONDS = 0.005
"""Pause after a step that did nothing although there is work, so that a starved engine doesn't burn a core."""

LEAST_STEP_SECONDS = 1e-6
"""No step takes less; so one that has ended shows, by whatever clock."""

TURN_SECONDS = 0.02
"""What short steps bring is collected so often: to wake the event loop for each would take a core from the next. First and last words, and
what a long step brings, don't wait."""

Answer = TypeVar("Answer")

_logger = log.get(__name__)


class Sink(Protocol):
    """Where a request's outputs go. Called on the event loop."""

    def push(self, output: Any) -> None:
        """News of it: a TokenOutput of one choice, an EncodeOutput."""

    def fail(self, error: StatusError) -> None:
        """The request has ended like this; nothing follows."""


@dataclass(frozen=True)
class _Errand:
    """Something to ask of the device between steps."""

    run: Callable[[SharedDevice, float], Any]
    done: asyncio.Future[Any]


Command = Request | str | _Errand
"""A request to add, an id to abort, or an errand."""


@dataclass
class _Open:
    """A request that the engine hasn't ended."""

    sink: Sink
    num_open_choices: int


class EngineLoop:
    """Runs a device's engines, which nobody else touches."""

    def __init__(
        self, device: SharedDevice, *, clock: Callable[[], float] = time.monotonic, observe: Callable[[Turn], None] | None = None
    ) -> None:
        """`observe` sees each turn on the event loop, after its outputs were delivered."""
        self._device = device
        self._clock = clock
        self._observe = observe
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._started = self._stopping = False
        self._open: dict[str, _Open] = {}
        self._progressed_at = clock()
        self._stepping_since: float | None = None
        self._longest_step_seconds = 0.0
        self._window = StepWindow()
        self._unsaid: list[Turn] = []  # by the thread, and not collected
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.last_turn = Turn(device.stats(), {})
        self.num_stale_outputs = 0

    def start(self) -> None:
        """Starts the thread. Call it on the event loop that shall hear of the outputs."""
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._thread.start()
        self._started = True

    def add(self, request: Request, sink: Sink) -> None:
        """Hands a request over; its id must be new. What comes of it goes to `sink`."""
        assert request.request_id not in self._open, request.request_id
        if self.failed.done():
            sink.fail(StatusError(Code.INTERNAL, "the engine has failed; this worker is stopping", reason="ENGINE_FAILED"))
            return
        if self.stalled_seconds == 0.0:
            self._progressed_at = self._clock()
        self._open[request.request_id] = _Open(sink, request.num_open_choices)
        if self._timer is None:
            self._timer = self._loop.call_at(self._next_beat(), self._tick)
        self._command(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, in whatever state; nothing more comes of it. Idempotent."""
        if self._open.pop(request_id, None) is not None:
            self._command(request_id)

    async def ask(self, run: Callable[[SharedDevice, float], Answer]) -> Answer:
        """What the device answers to this, between two steps; the time goes with it. StatusError: the engine has failed."""
        if self.failed.done() or self._stopping:
            raise StatusError(Code.UNAVAILABLE, "this worker is stopping", reason="ENGINE_FAILED")
        if self.stalled_seconds == 0.0:
            self._progressed_at = self._clock()
        done: asyncio.Future[Answer] = self._loop.create_future()
        self._command(_Errand(run, done))
        return await done

    async def stop(self, timeout_seconds: float = 5.0) -> bool:
        """Ends the thread after its current step. False: the step didn't end in time, and the thread was left behind."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    @property
    def stalled_seconds(self) -> float:
        """How long there has been work without progress; 0 when idle."""
        has_work = bool(self._open or self._commands) or self._stepping_since is not None
        return self._clock() - self._progressed_at if has_work else 0.0

    @property
    def limit(self) -> Limit:
        """How long it may go without progress: well above the longest step that there was or may be."""
        return Limit.of(max(self._longest_step_seconds, self._device.full_step_seconds()))

    @property
    def healthy(self) -> bool:
        """False when the engine has failed, its thread is gone, or has work and makes no progress."""
        return not self.failed.done() and not self._is_dead() and self.stalled_seconds < self.limit.seconds

    @property
    def lost(self) -> bool:
        """True when it has made no progress for so long that it won't come back, or has no thread any more."""
        return self._is_dead() or self.stalled_seconds > self.limit.lost_seconds

    def forgive(self, seconds: float) -> None:
        """The process itself was stopped for so long: no step could end."""
        self._progressed_at += seconds

    def _is_dead(self) -> bool:
        return self._started and not self._stopping and not self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests handed over and not ended."""
        return len(self._open)

    @property
    def utilization(self) -> float:
        """Share of the last second that the engine was stepping, 0 .. 1."""
        return self._window.utilization(self._clock(), self._stepping_since)

    @property
    def step_seconds(self) -> float:
        """Mean duration of the last second's steps; 0 when there was none."""
        return self._window.step_seconds(self._clock())

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated in the last second."""
        return self._window.tokens_per_second(self._clock())

    def _command(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _tick(self) -> None:
        self._collect()
        self._timer = self._loop.call_at(self._next_beat(), self._tick) if self._open else None

    def _next_beat(self) -> float:
        """By the event loop's clock; at the times at which messages go, so that all is one wake-up."""
        return TURN_SECONDS * (self._loop.time() // TURN_SECONDS + 1)

    def _collect(self) -> None:
        """On the event loop: all that the thread has to say by now, as one turn."""
        with self._wake:
            unsaid, self._unsaid = self._unsaid, []
        if unsaid:
            self._deliver(joined(unsaid))

    def _deliver(self, turn: Turn) -> None:
        """Hands each output to its request. Outputs of a request that has ended meanwhile are late, not wrong."""
        self.last_turn = turn
        for step in turn.steps:
            self._window.record(step)
        for request_id, error in turn.refusals:
            if (request := self._open.pop(request_id, None)) is not None:
                request.sink.fail(error)
        for output in turn.outputs:
            self._hand_out(output)
        if self._observe is not None:
            self._observe(turn)

    def _hand_out(self, output: Output) -> None:
        if (request := self._open.get(output.request_id)) is None:
            self.num_stale_outputs += 1
            return
        if output.finish_reason is not None:
            request.num_open_choices -= 1
            if request.num_open_choices == 0:
                del self._open[output.request_id]
        request.sink.push(output)

    def _fail(self, error: BaseException) -> None:
        """On the event loop: the engine is lost, and with it every request."""
        if self.failed.done():
            return
        self._collect()  # what it said before is good
        self.failed.set_result(error)
        requests, self._open = self._open, {}
        for request in requests.values():
            request.sink.fail(StatusError(Code.INTERNAL, "the engine failed; this worker is stopping", reason="ENGINE_FAILED"))

    # ---- on the thread

    def _run(self) -> None:
        try:
            while (commands := self._take()) is not None:
                turn = self._turn(commands)
                if commands or turn.steps:
                    self._say(turn, urgent=bool(commands))
        except BaseException as error:  # whatever it was, the engine's state can't be trusted any more
            _logger.exception("the engine failed")
            self._post(self._fail, error)
        finally:
            self._post(self._ended.set)

    def _turn(self, commands: list[Command]) -> Turn:
        refusals = self._apply(commands)
        started = self._clock()
        if not self._device.has_work:
            self._progressed_at = started
            self._device.move(started)
            return Turn(self._device.stats(), {}, refusals=refusals)
        self._stepping_since = started
        done = self._device.step(started)
        self._stepping_since = None
        step = Step(done.model, started, self._clock(), done.num_tokens, done.num_generated_tokens)
        self._device.took(step.model, step.seconds)
        self._longest_step_seconds = max(self._longest_step_seconds, step.seconds, LEAST_STEP_SECONDS)
        if done.outputs or step.num_tokens:
            self._progressed_at = step.ended
        else:
            self._pause()
        return Turn(self._device.stats(), self._device.progress(), done.outputs, refusals, [step])

    def _say(self, turn: Turn, *, urgent: bool) -> None:
        """Leaves a turn to be collected, at once where somebody waits for it."""
        urgent |= any(output.is_urgent for output in turn.outputs)
        with self._wake:
            self._unsaid.append(turn)
        if urgent or any(2 * step.seconds > TURN_SECONDS for step in turn.steps):
            self._post(self._collect)

    def _pause(self) -> None:
        with self._wake:
            if not self._commands and not self._stopping:
                self._wake.wait(IDLE_STEP_SECONDS)

    def _apply(self, commands: list[Command]) -> list[tuple[str, StatusError]]:
        """Adds, aborts and errands in order; answers which requests were refused, and why."""
        refusals = []
        for command in commands:
            if isinstance(command, str):
                self._device.abort(command)
                continue
            if isinstance(command, _Errand):
                self._post(_answer, command.done, command.run(self._device, self._clock()))
                continue
            try:
                self._device.add(command)
            except (RequestTooLarge, InvalidRequest) as error:
                refusals.append((command.request_id, StatusError(Code.INVALID_ARGUMENT, str(error), reason="REQUEST_REFUSED")))
        return refusals

    def _take(self) -> list[Command] | None:
        """The commands that came in; sleeps while there is neither a command nor work, not long while weights move. None: stop."""
        with self._wake:
            while not self._commands and not self._stopping and not self._device.has_work:
                if not self._wake.wait(IDLE_STEP_SECONDS if self._device.is_moving else None):
                    break
            if self._stopping:
                return None
            commands, self._commands = list(self._commands), deque()
            return commands

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the event loop is closed: nobody is left to hear
            self._stopping = True


def _answer(done: "asyncio.Future[Any]", answer: object) -> None:
    """On the event loop. Whoever asked may have gone."""
    if not done.done():
        done.set_result(answer)
