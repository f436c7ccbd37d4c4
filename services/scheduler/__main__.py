"""`python -m services.scheduler`: reads settings, serves until a stop signal. Prints one JSON line when it listens."""

import asyncio
import json
import sys

from pydantic import ValidationError

from services.common import log, process, rpc
from services.common.errors import StatusError
from services.scheduler.scheduler import Options, Scheduler
from services.scheduler.server import add_services
from services.scheduler.settings import SchedulerSettings
from services.scheduler.store import SchemaError, Store

DRAIN_SECONDS = 2.0


class StartError(Exception):
    """Why the process can't start, in one line."""


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """One scheduler's whole life."""
    store = await open_store(settings)
    scheduler = Scheduler(store, Options.of(settings))
    server = rpc.server()
    add_services(server, scheduler)
    internal = process.InternalHttp(settings.internal_address, scheduler.metrics.registry, scheduler.not_ready_reason)
    try:
        port = rpc.bind(server, settings.listen_address)
        internal_port = await internal.start()
        scheduler.start()
        await server.start()
        address = f"{settings.listen_address.rpartition(':')[0]}:{port}"
        internal_address = f"{settings.internal_address.rpartition(':')[0]}:{internal_port}"
        line = {"event": "listening", "service": "scheduler", "address": address, "internal_address": internal_address}
        print(json.dumps(line), flush=True)
        await scheduler.run_until(stop)
    finally:
        await scheduler.stop()
        await server.stop(DRAIN_SECONDS)
        await scheduler.drain()
        await internal.stop()
        await store.close()


async def open_store(settings: SchedulerSettings) -> Store:
    """A store whose Redis answers and has a schema that we know; StartError if not."""
    try:
        store = Store(settings.redis_url, timeout_seconds=settings.redis_timeout_seconds)
    except ValueError as error:
        raise StartError(f"FOREBAY_REDIS_URL is not a Redis URL ({error})") from error
    try:
        await store.open(settings.redis_wait_seconds)
    except StatusError as error:
        await store.close()
        raise StartError(
            f"no Redis answers at FOREBAY_REDIS_URL after {settings.redis_wait_seconds:g} s: start it, or name another"
        ) from error
    except BaseException:
        await store.close()
        raise
    return store


def main() -> int:
    """Exit status: 0 after a stop signal, 1 if it can't start, 2 for settings that make no sense."""
    try:
        settings = SchedulerSettings()  # type: ignore[call-arg]  # every field comes from the environment or has a default
    except ValidationError as error:
        for problem in error.errors():
            name = "_".join(str(part) for part in problem["loc"])
            print(f"FOREBAY_{name.upper()}: {problem['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return 2
    log.setup("scheduler", settings.log_level)
    try:
        process.run(lambda stop: serve(settings, stop))
    except (StartError, SchemaError, OSError) as error:
        print(f"forebay scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
