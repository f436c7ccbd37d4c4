"""`python -m services.worker`: loads models, serves them to the mesh, drains on SIGTERM."""

import asyncio
import functools
import os
import sys
import threading

from services.common import log, process, tls, tracing
from services.common.process import announce
from services.common.settings import SettingsError, read
from services.worker.engine.config import ModelFileError
from services.worker.loading import load
from services.worker.settings import WorkerSettings
from services.worker.worker import EngineFailed, Worker


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """A worker's life."""
    identity = tls.mutual(settings, "worker")
    loaded = await load(settings, stop)
    if loaded is None:
        return
    worker = Worker(loaded, settings, identity=identity)
    await worker.start()
    announce("listening", service="worker", address=worker.address, internal_address=worker.internal_address)
    try:
        await worker.until(stop)
        await worker.drain(settings.drain_seconds)
    finally:
        await worker.stop()


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
