"""Workers that die, stand still, hang, are poisoned, and are restarted."""

import asyncio
import signal
import time

from bench.chaos.fleet import LEASE_SECONDS
from bench.chaos.process import Process, until
from bench.chaos.runner import HANGS, KILLS, RAISES
from bench.chaos.traffic import Stream, prompt, streams
from bench.chaos.trial import Row, Trial

NUM_STREAMS = 32
NUM_TOKENS = 100


def _victim(trial: Trial) -> Process:
    return trial.fleet.workers[trial.number % len(trial.fleet.workers)]


async def _newest_epoch(trial: Trial, stream: Stream) -> int:
    return int(await trial.fleet.redis.hget(f"forebay:2:ticket:{stream.request_id}", "epoch") or 0)


async def _num_moved(trial: Trial) -> int:
    """Streams that were placed more than once."""
    epochs = await asyncio.gather(*(_newest_epoch(trial, stream) for stream in trial.surviving if stream.request_id))
    return sum(epoch > 1 for epoch in epochs)


async def killed_in_mid_stream(trial: Trial) -> None:
    flow = trial.flow(streams(NUM_STREAMS, NUM_TOKENS))
    await flow.until(lambda stream: stream.num_received >= 5)
    pid = _victim(trial).pid
    await trial.fleet.kill(_victim(trial))
    trial.prove(f"pid {pid} is gone", not _victim(trial).lives or _victim(trial).pid != pid)
    await flow.end()
    trial.prove("streams moved", await _num_moved(trial))


async def killed_with_several_choices(trial: Trial) -> None:
    flow = trial.flow(streams(8, 60, n=3))
    await flow.until(lambda stream: stream.num_received >= 15)
    await trial.fleet.kill(_victim(trial))
    await flow.end()
    trial.prove("streams moved", await _num_moved(trial))


async def killed_before_the_first_token(trial: Trial) -> None:
    flow = trial.flow(streams(NUM_STREAMS, 20, length=600))
    worker = f"w{trial.fleet.workers.index(_victim(trial))}"

    async def has_leases() -> bool:
        return bool(await trial.fleet.redis.scard(f"forebay:2:leases:{worker}") >= NUM_STREAMS // 4)

    await until(has_leases, "the worker has leases", 10)
    trial.prove("no token was there yet for some", any(not stream.num_received for stream in flow.streams))
    await trial.fleet.kill(_victim(trial))
    await flow.end()
    trial.prove("streams moved", await _num_moved(trial))


async def stopped_and_continued(trial: Trial) -> None:
    """A worker stands still for two leases and goes on with what is no longer its own."""
    flow = trial.flow(streams(16, NUM_TOKENS))
    await flow.until(lambda stream: stream.num_received >= 5)
    victim = _victim(trial)
    before = victim.num_starts
    victim.signal(signal.SIGSTOP)
    await until(lambda: victim.is_stopped, "the worker is stopped")
    await asyncio.sleep(2 * LEASE_SECONDS)
    victim.signal(signal.SIGCONT)
    await flow.end()
    trial.prove("streams moved", await _num_moved(trial))
    await trial.fleet.whole(20)
    trial.expect("it came back by itself, in the same process", victim.num_starts == before)


async def restarted_in_turn(trial: Trial) -> None:
    """Every worker and scheduler gets SIGTERM, one after another, while requests come without a pause."""
    stop, waves = asyncio.Event(), []

    async def keep_asking() -> None:
        while not stop.is_set():
            flow = trial.flow(streams(4, 40) + streams(1, 400))  # the last outlives a drain
            waves.append(flow)
            await asyncio.sleep(0.6)

    asking = asyncio.create_task(keep_asking())
    await asyncio.sleep(0.5)
    for process in (*trial.fleet.workers, *trial.fleet.schedulers):
        began = time.monotonic()
        code = await process.stop()
        trial.prove(f"{process.name} ended by itself", code == 0)
        trial.expect(f"{process.name} drained within its bound", time.monotonic() - began < 8)
        await process.start()
        await trial.fleet.whole(30)
    stop.set()
    await asking
    for flow in waves:
        await flow.end()


async def fatal_error(trial: Trial) -> None:
    flow = trial.flow(streams(16, NUM_TOKENS))
    await flow.until(lambda stream: stream.num_received >= 5)
    cause = Stream([RAISES, 3, *prompt()], 20)
    trial.others.append(cause)
    asking = asyncio.create_task(trial.traffic.run(cause))
    ended = await _first_to_end(trial)
    trial.prove("a worker ended with an error", ended.exit_code == 1)
    trial.fleet.respawn(ended)
    await _respawn_until_ended(trial, asking)
    await flow.end()


async def _first_to_end(trial: Trial, seconds: float = 30.0) -> Process:
    await until(lambda: any(not worker.lives for worker in trial.fleet.workers), "a worker has ended", seconds)
    return next(worker for worker in trial.fleet.workers if not worker.lives)


async def _respawn_until_ended(trial: Trial, asking: "asyncio.Task[Stream]") -> int:
    """Restarts what dies until the stream has ended; how many died."""
    num_deaths = 0
    while not asking.done():
        for worker in trial.fleet.workers:
            if not worker.lives and not trial.fleet.is_respawning(worker):
                num_deaths += 1
                trial.fleet.respawn(worker)
        await asyncio.sleep(0.02)
    return num_deaths


async def poison(trial: Trial) -> None:
    """A request that kills its worker at its fourth token, beside healthy ones."""
    before = trial.fleet.num_deaths
    flow = trial.flow(streams(16, 300, deadline=90))
    await flow.until(lambda stream: stream.num_received >= 5)
    cause = Stream([KILLS, 3, *prompt()], 20, deadline=90)
    trial.others.append(cause)
    await _respawn_until_ended(trial, asyncio.create_task(trial.traffic.run(cause)))
    await flow.end(100)
    deaths = trial.fleet.num_deaths - before
    trial.prove("a worker died of it", deaths)
    trial.expect(f"at most 2 workers die, not {deaths}", deaths <= 2)
    trial.expect(f"it is refused as quarantined, not {cause.error} {cause.reason}", cause.reason == "QUARANTINED")


async def hanging_steps(trial: Trial) -> None:
    """A step hangs, or the event loop does: not ready, streams elsewhere, and a new process."""
    flow = trial.flow(streams(8, 2000, deadline=120))
    await flow.until(lambda stream: stream.num_received >= 5)
    victim = _victim(trial)
    began = time.monotonic()
    stuck = trial.number % 3 == 2
    victim.signal(signal.SIGUSR2 if stuck else signal.SIGUSR1)

    async def not_ready() -> bool:
        return await trial.fleet.status(victim, "/ready") != 200

    seconds = await until(not_ready, "the worker isn't ready", 30)
    trial.expect(f"not ready within 10 s, not {seconds:.1f}", seconds <= 10)
    code = await victim.ended(60)
    trial.prove("it ended with an error", code == 1)
    trial.expect(f"ended within {time.monotonic() - began:.0f} s of 35", time.monotonic() - began < 35)
    trial.fleet.respawn(victim)
    await flow.end(120)


async def hanging_request(trial: Trial) -> None:
    """As poison, for a request whose step never ends."""
    before = trial.fleet.num_deaths
    cause = Stream([HANGS, 3, *prompt()], 20, deadline=120)
    trial.others.append(cause)
    await _respawn_until_ended(trial, asyncio.create_task(trial.traffic.run(cause)))
    trial.prove("workers ended by it", trial.fleet.num_deaths - before)
    trial.expect(f"it is refused as quarantined, not {cause.error} {cause.reason}", cause.reason == "QUARANTINED")


ROWS = (
    Row("F01", "SIGKILL of a worker in mid-stream, 32 streams", killed_in_mid_stream, 20, 100, has_gap=True),
    Row("F02", "the same, 3 choices each", killed_with_several_choices, has_gap=True),
    Row("F03", "SIGKILL of a worker before the first token", killed_before_the_first_token, 20, 100, has_gap=True),
    Row("F05", "SIGSTOP of a worker for two leases, then SIGCONT", stopped_and_continued, 20, 100, has_gap=True),
    Row("F06", "SIGTERM of all workers and schedulers in turn", restarted_in_turn, has_gap=True),
    Row("F19", "an error that ends the engine", fatal_error, has_gap=True),
    Row("F20", "a request that kills its workers", poison),
    Row("F29", "a step or an event loop that hangs", hanging_steps),
)
