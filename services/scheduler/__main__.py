"""`python -m services.scheduler`: reads settings, serves until a stop signal. Prints one JSON line when it listens."""

import asyncio
import functools
import sys
from contextlib import suppress

from services.common import log, process, rpc, tls, tracing
from services.common.address import with_port
from services.common.callers import Callers
from services.common.errors import StatusError
from services.common.process import announce
from services.common.settings import SettingsError, read
from services.policy.document import PolicyError
from services.policy.watched import PolicyFile
from services.scheduler.scheduler import Options, Scheduler
from services.scheduler.server import CALLERS, add_services
from services.scheduler.settings import SchedulerSettings
from services.scheduler.store import SchemaError, Store

DRAIN_SECONDS = 2.0


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """One scheduler's whole life."""
    policy, identity = open_policy(settings), tls.mutual(settings, "scheduler")
    store = await open_store(settings)
    scheduler = Scheduler(store, Options.of(settings), policy)
    with suppress(StatusError):  # Redis has gone again: what operators have set is read when it is back.
        await scheduler.refresh()
    server = rpc.server([Callers(CALLERS)] if identity else [])
    add_services(server, scheduler)
    internal = process.InternalHttp(settings.internal_address, scheduler.metrics.registry, scheduler.not_ready_reason)
    try:
        port = rpc.bind(server, settings.listen_address, identity)
        internal_port = await internal.start()
        scheduler.start()
        await server.start()
        announce(
            "listening",
            service="scheduler",
            address=with_port(settings.listen_address, port),
            internal_address=with_port(settings.internal_address, internal_port),
        )
        await scheduler.run_until(stop)
    finally:
        await scheduler.stop()
        await server.stop(DRAIN_SECONDS)
        await scheduler.drain()
        await internal.stop()
        await store.close()


def open_policy(settings: SchedulerSettings) -> PolicyFile:
    """The policy file that is set; SettingsError if it can't be used."""
    try:
        return PolicyFile(settings.policy_file)
    except (PolicyError, OSError) as error:
        raise SettingsError(f"FOREBAY_POLICY_FILE can't be used: {error}") from error


async def open_store(settings: SchedulerSettings) -> Store:
    """A store whose Redis answers and has a schema that we know; SettingsError if not."""
    try:
        store = Store(settings.redis_url, password=_password(settings), timeout_seconds=settings.redis_timeout_seconds)
    except ValueError as error:
        raise SettingsError(f"FOREBAY_REDIS_URL is not a Redis URL ({error})") from error
    try:
        await store.open(settings.redis_wait_seconds)
    except StatusError as error:
        await store.close()
        raise SettingsError(
            f"no Redis answers at FOREBAY_REDIS_URL after {settings.redis_wait_seconds:g} s ({store.trouble}): start it, or name another"
        ) from error
    except BaseException:
        await store.close()
        raise
    return store


def _password(settings: SchedulerSettings) -> str | None:
    """What the password file holds, without the line's end; SettingsError where it can't be read or is empty."""
    if settings.redis_password_file is None:
        return None
    try:
        password = settings.redis_password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"FOREBAY_REDIS_PASSWORD_FILE={settings.redis_password_file} can't be read ({error})") from error
    if not password:
        raise SettingsError(f"FOREBAY_REDIS_PASSWORD_FILE={settings.redis_password_file} is empty")
    return password


def main() -> int:
    """0 after a stop by signal; 1, and one line on stderr, for anything that stands in its way."""
    try:
        settings = read(SchedulerSettings)
        log.setup("scheduler", settings.log_level)
        tracing.setup("scheduler")
        process.run(functools.partial(serve, settings))
    except (SettingsError, SchemaError, OSError) as error:
        print(f"forebay scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
