"""The only module that speaks to Redis: connections, scripts, events. Trouble becomes UNAVAILABLE within a second.

It knows nothing of tickets; ledger.py gives each script its Python face.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha1
from importlib import resources
from typing import Any

from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from services.common import errors, log
from services.scheduler import keys

LOG = log.get(__name__)
MAX_CONNECTIONS = 16
"""More exchanges than this wait for each other; Redis runs one script at a time anyway."""
PROBE_SECONDS = (0.1, 0.5)
"""The first pause before a probe of a Redis that is away, and the longest; doubled in between."""
FRESH_SECONDS = 1.0
"""Trouble younger than this is worth a moment's wait (a stalled disk, a failover); callers are told so by RetryInfo."""


_SHARED = ("clock", "quota", "usage", "turns", "common", "jobs")
"""Scripts that are no calls of their own, each using those before it."""
_SCHEMA_CHECK: Sequence[Sequence[str]] = (["SET", keys.SCHEMA, keys.SCHEMA_VERSION, "NX"], ["GET", keys.SCHEMA])


@dataclass(frozen=True)
class Call:
    """One script with its KEYS and ARGV."""

    script: str
    keys: Sequence[str] = ()
    args: Sequence[str | int | float] = ()


class SchemaError(Exception):
    """Redis holds data of a layout that this scheduler doesn't know."""


def load_scripts() -> dict[str, str]:
    """Name -> text of every script, with the key table and what all scripts share in front."""
    folder = resources.files("services.scheduler") / "lua"
    texts = {file.name.removesuffix(".lua"): file.read_text() for file in folder.iterdir() if file.name.endswith(".lua")}
    prelude = keys.LUA_TABLE + "".join(texts.pop(name) for name in _SHARED)
    return {name: prelude + text for name, text in texts.items()}


class Store:
    """A few connections to one Redis. ValueError for a URL that is none.

    After a failure every call fails at once, without asking Redis, until a probe in the background has succeeded.
    """

    def __init__(self, url: str, *, password: str | None = None, timeout_seconds: float = 0.5) -> None:
        """A password in the URL goes before `password`."""
        self._timeout_seconds = timeout_seconds
        # No retries inside the client: they would outlast the second that callers have.
        options: dict[str, Any] = {"password": password, "decode_responses": True, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
        # No socket timeout of its own either: before Python 3.12 it loses cancellations (wait_for). _attempt has the clock.
        options |= {"socket_connect_timeout": timeout_seconds, "socket_timeout": None}
        self._factory = ConnectionPool.from_url(url, **options)
        self._subscriber = ConnectionPool.from_url(url, health_check_interval=5, **options)
        self._limit = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[Connection] = []
        self._closed = False
        self.num_in_use = 0
        self.num_failures = 0
        self.trouble = ""
        """What Redis or its connection failed with last."""
        self._away_since: float | None = None
        self._prober: asyncio.Task[None] | None = None
        self._scripts = load_scripts()
        self._hashes = {name: sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in self._scripts.items()}

    @property
    def is_away(self) -> bool:
        """Whether Redis has failed and not answered a probe since."""
        return self._away_since is not None

    async def open(self, wait_seconds: float = 0) -> None:
        """Waits for Redis and checks the schema. SchemaError; StatusError UNAVAILABLE if Redis isn't there in time."""
        give_up = time.monotonic() + wait_seconds
        while True:
            try:
                return await self.check_schema()
            except errors.StatusError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(0.1)

    async def check_schema(self) -> None:
        """Writes the schema's version into an empty Redis; SchemaError if another one is there."""
        _, found = await self.commands(*_SCHEMA_CHECK)
        if found != keys.SCHEMA_VERSION:
            raise SchemaError(
                f"Redis holds Forebay data of schema {found}; this scheduler knows schema {keys.SCHEMA_VERSION}: "
                f"use its own version of Forebay, or another database number in FOREBAY_REDIS_URL"
            )

    async def close(self) -> None:
        """Closes every connection, those in use as soon as they are idle."""
        self._closed = True
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait([self._prober])
        await self._close_idle()
        await self._subscriber.disconnect()

    async def _close_idle(self) -> None:
        while self._idle:
            with suppress(RedisError, OSError):
                await self._idle.pop().disconnect(nowait=True)

    async def run(self, call: Call) -> Any:
        """What one script returns."""
        (reply,) = await self.run_many([call])
        return reply

    async def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """What several scripts return, sent together. They are not one transaction."""
        commands = [["EVALSHA", self._hashes[c.script], len(c.keys), *c.keys, *c.args] for c in calls]
        replies = await self._attempt(commands)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:  # A new or flushed Redis.
            await self.commands(*(["SCRIPT", "LOAD", text] for text in self._scripts.values()))
            for i, reply in zip(unknown, await self._attempt([commands[i] for i in unknown]), strict=True):
                replies[i] = reply
        return self._checked(replies)

    async def commands(self, *commands: Sequence[str | int | float]) -> list[Any]:
        """What plain commands return, sent together."""
        return self._checked(await self._attempt(commands))

    def _checked(self, replies: list[Any]) -> list[Any]:
        try:
            _raise_error(replies)
        except RedisError as error:  # Loading, read-only, out of memory, or a script that is wrong.
            raise self._trouble(error) from error
        return replies

    async def _attempt(self, commands: Sequence[Sequence[str | int | float]]) -> list[Any]:
        async with self._limit:
            if self._away_since is not None:
                raise self._refusal()
            try:
                return await self._ask(commands)
            except (RedisError, OSError, TimeoutError) as error:
                raise self._trouble(error) from error

    async def _ask(self, commands: Sequence[Sequence[str | int | float]]) -> list[Any]:
        async with asyncio.timeout(self._timeout_seconds):
            try:
                return await self._exchange(commands)
            except (RedisConnectionError, OSError):
                # Idle connections don't survive a restart of Redis. Every script may run twice.
                await self._close_idle()
                return await self._exchange(commands)

    async def _exchange(self, commands: Sequence[Sequence[str | int | float]]) -> list[Any]:
        connection: Any = self._idle.pop() if self._idle else self._factory.make_connection()  # type: ignore[no-untyped-call]
        self.num_in_use += 1
        transport: asyncio.WriteTransport | None = None
        try:
            await connection.connect()
            transport = connection._writer.transport
            await connection.send_packed_command(connection.pack_commands(commands))
            replies = [await _read(connection) for _ in commands]
        except BaseException:
            # Cancelled too: an unread reply would be taken for the answer to the next caller's question.
            with suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)
            if transport is not None:
                transport.abort()  # or it would stay until Redis has read what was on its way, which may be never
            raise
        finally:
            self.num_in_use -= 1
        self._idle.append(connection)
        if self._closed:
            await self._close_idle()
        return replies

    def _trouble(self, error: Exception) -> errors.StatusError:
        self.num_failures += 1
        self.trouble = str(error) or type(error).__name__
        if self._away_since is None:
            LOG.warning("redis_trouble", error=self.trouble)
            self._away_since = time.monotonic()
            self._prober = asyncio.create_task(self._probe())
        return self._refusal()

    def _refusal(self) -> errors.StatusError:
        assert self._away_since is not None
        fresh = time.monotonic() - self._away_since < FRESH_SECONDS
        return errors.unavailable("the queue's store is away: try again soon", PROBE_SECONDS[0] if fresh else 1.0, "STORE_UNAVAILABLE")

    async def _probe(self) -> None:
        """Asks Redis until it takes a write: a full or a read-only one would answer a ping."""
        pause, longest = PROBE_SECONDS
        while self._away_since is not None:
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)
            try:
                _raise_error(await self._ask(_SCHEMA_CHECK))
            except (RedisError, OSError, TimeoutError):
                self.num_failures += 1
                continue
            LOG.info("redis_back", seconds=round(time.monotonic() - self._away_since, 3))
            self._away_since = None

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What other schedulers publish, for ever; {'event': 'subscribed'} after every (re)connection, as events may have been missed."""
        while True:
            async with Redis(connection_pool=self._subscriber).pubsub(ignore_subscribe_messages=True) as subscription:
                try:
                    await subscription.subscribe(keys.EVENTS)
                    yield {"event": "subscribed"}
                    while True:
                        message = await subscription.get_message(timeout=5)
                        if message is not None:
                            yield json.loads(message["data"])
                except (RedisError, OSError, TimeoutError):
                    LOG.debug("events_lost")
            await asyncio.sleep(PROBE_SECONDS[0])


def _raise_error(replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply


async def _read(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except RedisConnectionError:
        raise
    except RedisError as error:
        return error
