"""The store under cancellation and trouble: no reply goes to another's question, no connection leaks, the circuit opens and closes."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.store import Call, SchemaError, Store
from tests.scheduler_harness import until


@pytest.fixture
async def slow_url(redis_server) -> AsyncIterator[str]:
    """The same Redis behind a proxy that delays every reply by up to 20 ms."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(delay * random.random())
                writer.write(data)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis, from_redis = await asyncio.open_unix_connection(str(redis_server.socket_path))
        for task in (loop.create_task(pump(reader, from_redis, 0)), loop.create_task(pump(to_redis, writer, 0.02))):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/0"
    proxy.close()
    await until(lambda: not tasks)


async def test_cancelled_calls_never_hand_their_reply_to_another(slow_url: str) -> None:
    """Case B36: 1,000 cancels at random times, single commands and several at once, every answer checked."""
    store = Store(slow_url, timeout_seconds=5)
    await store.commands(*(["SET", f"k{i}", i] for i in range(50)))
    wrong: list[object] = []

    async def ask() -> None:
        numbers = [random.randrange(50) for _ in range(random.choice([1, 1, 4]))]
        answers = await store.commands(*(["GET", f"k{i}"] for i in numbers))
        if answers != [str(i) for i in numbers]:
            wrong.append((numbers, answers))

    async def cancelled() -> None:
        task = asyncio.create_task(ask())
        await asyncio.wait([task], timeout=random.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(20):
        await asyncio.gather(*(cancelled() for _ in range(50)), *(ask() for _ in range(5)))
    assert wrong == []
    assert store.num_in_use == 0
    assert not store.is_away
    await asyncio.gather(*(ask() for _ in range(50)))
    assert wrong == []
    await store.close()


async def test_no_cancellation_is_ever_lost(redis_server) -> None:
    store = Store(redis_server.url, timeout_seconds=5)

    async def for_ever() -> None:
        while True:
            await store.commands(["PING"])

    for i in range(200):
        task = asyncio.create_task(for_ever())
        await asyncio.sleep(0.0001 * (i % 20))
        task.cancel()
        _, pending = await asyncio.wait([task], timeout=20)
        assert not pending
    await store.close()


async def test_scripts_are_loaded_where_they_are_unknown(redis_server) -> None:
    store = Store(redis_server.url, timeout_seconds=5)
    call = Call("survey", [keys.QUEUES, keys.SERVING, keys.STARTING, keys.RUNNING])
    assert await store.run(call) == [[], [], 0]
    redis_server.command("SCRIPT FLUSH")
    assert await store.run_many([call, call]) == [[[], [], 0]] * 2
    await store.close()


async def test_an_unknown_schema_is_refused_with_both_versions(redis_server) -> None:
    redis_server.command(f"SET {keys.SCHEMA} 99")
    store = Store(redis_server.url, timeout_seconds=5)
    with pytest.raises(SchemaError, match=f"schema 99.* schema {keys.SCHEMA_VERSION}"):
        await store.open()
    redis_server.command("FLUSHALL")
    await store.open()
    assert redis_server.command(f"GET {keys.SCHEMA}") == f"$1\r\n{keys.SCHEMA_VERSION}\r\n".encode()
    await store.close()


async def test_trouble_is_unavailable_until_a_probe_succeeds(redis_server) -> None:
    store = Store(redis_server.url, timeout_seconds=5)
    await store.commands(["PING"])
    redis_server.kill()
    with pytest.raises(StatusError) as caught:
        await store.commands(["PING"])
    assert (caught.value.code, caught.value.retry_after_seconds) == (Code.UNAVAILABLE, 0.1)
    assert store.is_away
    failures = store.num_failures
    await until(lambda: store.num_failures > failures + 1)  # Probes go on without a caller.
    redis_server.start()
    survey = Call("survey", [keys.QUEUES, keys.SERVING, keys.STARTING, keys.RUNNING])

    async def answers() -> bool:
        try:
            return await store.run(survey) == [[], [], 0]
        except StatusError:
            return False

    await until(answers)  # Although the scripts are unknown now.
    assert not store.is_away
    await store.close()


async def test_callers_are_told_to_stay_away_longer_once_trouble_lasts(redis_server, monkeypatch) -> None:
    monkeypatch.setattr("services.scheduler.store.FRESH_SECONDS", 0.0)
    store = Store(redis_server.url, timeout_seconds=5)
    redis_server.kill()
    with pytest.raises(StatusError) as caught:
        await store.commands(["PING"])
    assert caught.value.retry_after_seconds == 1.0
    await store.close()


async def test_a_restart_between_calls_is_not_noticed(redis_server) -> None:
    store = Store(redis_server.url, timeout_seconds=5)
    await asyncio.gather(*(store.commands(["PING"]) for _ in range(10)))
    redis_server.kill()
    redis_server.start()
    assert await store.commands(["PING"]) == ["PONG"]
    assert store.num_failures == 0
    await store.close()


@pytest.mark.parametrize("setting", ["maxmemory 1", "min-replicas-to-write 3"])
async def test_a_redis_that_cannot_write_is_trouble_too(redis_server, setting: str) -> None:
    """Case F12."""
    store = Store(redis_server.url, timeout_seconds=5)
    redis_server.command(f"CONFIG SET {setting}")
    with pytest.raises(StatusError) as caught:
        await store.commands(["SET", "a", "b"])
    assert caught.value.code is Code.UNAVAILABLE
    failures = store.num_failures
    await until(lambda: store.num_failures > failures + 1)
    assert store.is_away, "it answers, but takes no write"
    redis_server.command(f"CONFIG SET {setting.split()[0]} 0")
    await until(lambda: not store.is_away)
    await store.close()


async def test_events_come_again_after_a_restart(redis_server) -> None:
    store = Store(redis_server.url, timeout_seconds=5)
    events = store.events()
    assert await anext(events) == {"event": "subscribed"}
    await store.commands(["PUBLISH", keys.EVENTS, '{"event": "room"}'])
    assert await anext(events) == {"event": "room"}
    coming = asyncio.create_task(anext(events))
    redis_server.kill()
    redis_server.start()
    assert await coming == {"event": "subscribed"}
    await events.aclose()
    await store.close()


def test_a_url_that_is_none() -> None:
    with pytest.raises(ValueError, match="redis://"):
        Store("http://example.com")


async def test_what_a_redis_that_hangs_has_not_read_is_dropped_with_its_connection(redis_server) -> None:
    store = Store(redis_server.url, timeout_seconds=0.2)
    await store.open()
    (connection,) = store._idle
    used = connection._writer.get_extra_info("socket")
    redis_server.pause()
    try:
        with pytest.raises(StatusError):
            await store.commands(["ECHO", "x" * (32 << 20)])  # more than sockets hold
        await until(lambda: used.fileno() == -1)
    finally:
        redis_server.resume()
        await store.close()
