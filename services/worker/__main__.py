"""`python -m services.worker`: loads models, serves them to the mesh, drains on SIGTERM."""

import asyncio
import faulthandler
import functools
import os
import sys
import threading

from services.common import log, process, tls, tracing
from services.common.process import announce
from services.common.settings import SettingsError, read
from services.worker.engine.config import ModelFileError
from services.worker.engine.engine import Engine
from services.worker.flight_record import FlightRecord, RecordedRunner
from services.worker.loading import load
from services.worker.settings import WorkerSettings
from services.worker.worker import EngineFailed, Worker

STUCK_SECONDS = 30.0
"""An event loop that nothing came by for so long ends with its process."""


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """A worker's life."""
    identity = tls.mutual(settings, "worker")
    loaded = await load(settings, stop)
    if loaded is None:
        return
    record = FlightRecord(settings.flight_record_file) if settings.flight_record_file else None
    if record is not None:
        for engine, _ in loaded.models:
            if isinstance(engine, Engine):  # nobody looks for who an encoder dies of: its inputs are bounded, and leave nothing behind
                engine.runner = RecordedRunner(engine.runner, record)
    died_with = record.before if record else ()
    worker = Worker(
        loaded.models,
        settings,
        arena=loaded.arena,
        weights=loaded.weights,
        budget=loaded.budget,
        identity=identity,
        died_with=died_with,
    )
    await worker.start()
    announce("listening", service="worker", address=worker.address, internal_address=worker.internal_address)
    guard = asyncio.create_task(guard_event_loop(), name="guard the event loop")
    try:
        await worker.until(stop)
        await worker.drain(settings.drain_seconds)
    finally:
        await worker.stop()
        guard.cancel()
        faulthandler.cancel_dump_traceback_later()


async def guard_event_loop() -> None:
    """For ever: who watches the engine may be stuck itself, on a lock or behind native code that keeps the interpreter.

    Then a thread that needs neither ends the process, with every thread's stack on stderr.
    """
    while True:
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        await asyncio.sleep(1.0)


def main() -> int:
    """0 after a stop by signal; 1, and one line on stderr, for anything else."""
    try:
        settings = read(WorkerSettings)
        log.setup("worker", settings.log_level)
        tracing.setup("worker")
        process.run(functools.partial(serve, settings))
    except (SettingsError, ModelFileError, OSError, EngineFailed) as error:
        print(f"forebay worker: {error}", file=sys.stderr)
        return 1
    return 0


def leave(code: int) -> None:
    """Ends the process even where a step or a load hangs in native code, which Python would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
