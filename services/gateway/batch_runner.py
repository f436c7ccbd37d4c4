"""Runs jobs' lines: takes them from schedulers, has each answered as the HTTP face would, and writes one result down for each.

It may die at any time: what it held goes to others after some seconds. Knows no endpoint.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

import orjson

from forebay.v1 import batch_pb2
from services.common import log
from services.common.errors import Code, StatusError
from services.gateway.batch_lines import LineCheck, parse
from services.gateway.batches import Jobs
from services.gateway.metrics import GatewayMetrics

_log = log.get(__name__)

MAX_STRIKES = 10
"""Times that a line may be lost, or fail on our side, before it ends with an error."""
MAX_RESULT_BYTES = 4 << 20
_AT_ONCE = 4  # lines of a lease
_LONGEST_DELAY, _LONGEST_PAUSE = 60.0, 30.0
_OURS = frozenset((Code.INTERNAL, Code.UNKNOWN, Code.ABORTED, Code.CANCELLED, Code.DATA_LOSS))
_WORDS = {
    "batch_cancelled": "the job was cancelled before this line was run",
    "batch_expired": "the job's time was over before this line was run",
}


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    idle: float = 1.0
    """Until it is looked again for work that nobody has told of."""
    renew: float = 5.0
    """Leases last for three times as long."""
    restart: float = 1.0
    backoff: float = 0.5
    """Until a line is tried again, doubled each time, at most a minute."""


@dataclass(frozen=True)
class Reply:
    """What a line was answered with. `body`: JSON."""

    status: int
    request_id: str
    body: bytes


Answer = Callable[[batch_pb2.LeasedLine, dict[str, object]], Awaitable[Reply]]
"""Answers a line, whose body it gets. StatusError for what may do better later; the client's own errors are replies."""


@dataclass(frozen=True)
class Later:
    """A line that has no result yet. Seconds until it is tried again, and until anything of its job is."""

    delay_seconds: float
    pause_seconds: float = 0.0
    strike: bool = False


@dataclass(frozen=True)
class Result:
    """A line's, as it is kept."""

    json: str
    failed: bool


class BatchRunner:
    """One gateway's. `most`: lines that it runs at once."""

    def __init__(self, jobs: Jobs, answer: Answer, metrics: GatewayMetrics, *, most: int, timing: Timing | None = None) -> None:
        self._jobs = jobs
        self._answer = answer
        self._metrics = metrics
        self._most = most
        self._timing = timing or Timing()
        self._woken = asyncio.Event()
        self._held: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._num_lines = 0

    def wake(self) -> None:
        """There may be work."""
        self._woken.set()

    async def run(self) -> None:
        """For ever. Whatever breaks in here is our bug: it is logged and counted, and work goes on."""
        try:
            while True:
                try:
                    await self._work()
                except Exception:
                    _log.exception("batch_runner_failed")
                    self._metrics.batch_runner_failures.inc()
                    await asyncio.sleep(self._timing.restart)
        finally:
            await self._leave()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            while True:
                self._woken.clear()
                await self._take()
                try:
                    async with asyncio.timeout(self._timing.idle):
                        await self._woken.wait()
                except TimeoutError:
                    continue

    async def _take(self) -> None:
        """Takes work until there is none, or no place for it."""
        while (free := self._most - self._num_lines) > 0:
            try:
                work = await self._jobs.lease(min(free, _AT_ONCE))
            except StatusError as error:
                _log.debug("no_batch_work", why=error.message)
                return
            for check in work.checks:
                self._hold(batch_pb2.LineLease(batch_id=check.batch_id, line=-1, epoch=check.epoch), self._check(check))
            for line in work.lines:
                self._num_lines += 1
                self._hold(line.lease, self._run(line))
            if len(work.lines) < min(free, _AT_ONCE):
                return

    def _hold(self, lease: batch_pb2.LineLease, work: Coroutine[object, object, None]) -> None:
        key = (lease.batch_id, lease.line, lease.epoch)
        task = self._held[key] = asyncio.create_task(work)

        def ended(_: object) -> None:
            self._held.pop(key, None)
            self._num_lines -= lease.line >= 0
            self._metrics.batch_in_flight.set(self._num_lines)
            self._woken.set()

        task.add_done_callback(ended)
        self._metrics.batch_in_flight.set(self._num_lines)

    async def _renew(self) -> None:
        """Speaks for what is held, and drops what is lost."""
        while True:
            await asyncio.sleep(self._timing.renew)
            keys = list(self._held)
            leases = [batch_pb2.LineLease(batch_id=batch_id, line=line, epoch=epoch) for batch_id, line, epoch in keys]
            try:
                lost = await self._jobs.renew(leases) if leases else ()
            except StatusError:  # no scheduler answers: what is run may still count
                continue
            for lease in lost:
                task = self._held.get((lease.batch_id, lease.line, lease.epoch))
                if task is not None:
                    self._metrics.batch_lines.labels("lost").inc()
                    task.cancel()

    async def _leave(self) -> None:
        """Gives everything back at once, so that others needn't wait for it."""
        held = dict(self._held)
        for task in held.values():
            task.cancel()
        await asyncio.gather(*held.values(), return_exceptions=True)
        lines = [batch_pb2.LineLease(batch_id=batch_id, line=line, epoch=epoch) for batch_id, line, epoch in held if line >= 0]
        returns = [self._jobs.give_back(batch_pb2.ReturnLineRequest(lease=lease)) for lease in lines]
        await asyncio.gather(*returns, return_exceptions=True)

    # -- one job's check

    async def _check(self, check: batch_pb2.LeasedCheck) -> None:
        lines = LineCheck(check.endpoint)
        try:
            async for text in self._jobs.content(check.org, check.input_file_id):
                await asyncio.to_thread(lines.part, text)
            lines.end()
            started = batch_pb2.StartBatchRequest(
                batch_id=check.batch_id, epoch=check.epoch, num_lines=lines.num_lines, errors=lines.errors
            )
            await self._jobs.start(started)
        except StatusError as error:  # somebody checks it anew when the lease is over
            _log.info("batch_check_failed", batch_id=check.batch_id, why=error.message)
        except Exception:
            _log.exception("batch_check_failed", batch_id=check.batch_id)

    # -- one line

    async def _run(self, line: batch_pb2.LeasedLine) -> None:
        try:
            outcome = await self._outcome(line)
        except Exception:  # our bug: the log gets the trace, the line another try
            _log.exception("batch_line_failed", batch_id=line.lease.batch_id, line=line.lease.line)
            outcome = Later(self._delay(line), strike=True)
        if isinstance(outcome, Later):
            self._metrics.batch_lines.labels("returned").inc()
            await self._give_back(line, outcome)
        else:
            kept = await self._commit(line, outcome)
            result = "failed" if outcome.failed else "completed"
            self._metrics.batch_lines.labels(result if kept else "refused").inc()

    async def _outcome(self, line: batch_pb2.LeasedLine) -> Result | Later:
        """What has become of it. A cancelled task has none: the lease says who goes on."""
        request = await asyncio.to_thread(parse, line.text) if len(line.text) > 64 << 10 else parse(line.text)
        if line.verdict:
            return _error(line, request, line.verdict, _WORDS.get(line.verdict, line.verdict))
        if line.strikes >= MAX_STRIKES:
            words = f"the line was lost or failed {line.strikes} times on our side: send it again, and report it if it fails again"
            return _error(line, request, "attempts_exhausted", words)
        try:
            reply = await self._answer(line, request["body"])
        except StatusError as error:
            return self._later(line, error)
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": orjson.Fragment(reply.body)}
        result = _result(line, request, response, None, failed=reply.status >= 400)
        if len(result.json) > MAX_RESULT_BYTES:
            words = f"the answer has {len(result.json)} characters; one line's may have {MAX_RESULT_BYTES}: ask for less"
            return _error(line, request, "result_too_large", words)
        return result

    def _later(self, line: batch_pb2.LeasedLine, error: StatusError) -> Later:
        """A refusal for want of room or quota costs a line nothing, but its job pauses; a failure on our side is a strike."""
        ours = error.code in _OURS or error.reason in ("WORKER_LOST", "ENGINE_ERROR", "SLOW_READER")
        _log.info("batch_line_later", batch_id=line.lease.batch_id, line=line.lease.line, code=error.code.name, why=error.message)
        asked = error.retry_after_seconds or 0.0
        pause = 0.0 if ours or error.code is Code.DEADLINE_EXCEEDED else min(max(asked, self._timing.backoff), _LONGEST_PAUSE)
        return Later(max(self._delay(line), asked), pause, strike=ours)

    def _delay(self, line: batch_pb2.LeasedLine) -> float:
        longest = min(_LONGEST_DELAY, self._timing.backoff * 2 ** min(line.lease.epoch - 1, 10))
        return float(longest * random.uniform(0.5, 1))  # noqa: S311  # guards nothing

    async def _commit(self, line: batch_pb2.LeasedLine, result: Result) -> bool:
        """Until a scheduler has it: what has been computed is not given up for a restart of Redis."""
        request = batch_pb2.CommitLineRequest(lease=line.lease, json=result.json, failed=result.failed)
        while True:
            try:
                return await self._jobs.commit(request)
            except StatusError as error:
                if error.code is not Code.UNAVAILABLE:
                    _log.error("batch_result_refused", batch_id=line.lease.batch_id, line=line.lease.line, why=error.message)
                    return False
            await asyncio.sleep(self._timing.backoff)

    async def _give_back(self, line: batch_pb2.LeasedLine, later: Later) -> None:
        request = batch_pb2.ReturnLineRequest(
            lease=line.lease, delay_seconds=later.delay_seconds, pause_seconds=later.pause_seconds, strike=later.strike
        )
        try:
            await self._jobs.give_back(request)
        except StatusError as error:  # it comes back by itself when the lease is over
            _log.debug("batch_line_not_returned", why=error.message)


def _result(line: batch_pb2.LeasedLine, request: dict[str, object], response: object, error: object, *, failed: bool) -> Result:
    entry = {
        "id": f"batch_req_{line.lease.batch_id.removeprefix('batch_')}_{line.lease.line + 1}",
        "custom_id": request["custom_id"],
        "response": response,
        "error": error,
    }
    return Result(orjson.dumps(entry).decode(), failed)


def _error(line: batch_pb2.LeasedLine, request: dict[str, object], code: str, message: str) -> Result:
    return _result(line, request, None, {"code": code, "message": message}, failed=True)
