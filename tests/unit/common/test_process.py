"""The internal port tells metrics, life and readiness; a stop signal ends a process in order."""

import asyncio
import os
import resource
import signal
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common import process


async def test_internal_port_answers_metrics_health_and_readiness() -> None:
    registry = CollectorRegistry()
    Counter("forebay_things", "Things.", registry=registry).inc(3)
    reasons: list[str | None] = ["model is loading", None]
    internal = process.InternalHttp("127.0.0.1:0", registry, lambda: reasons[0])
    port = await internal.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert "forebay_things_total 3.0" in (await client.get("/metrics")).text
            assert (await client.get("/health")).status_code == 200
            not_ready = await client.get("/ready")
            assert not_ready.status_code == 503
            assert "model is loading" in not_ready.text
            reasons.pop(0)
            assert (await client.get("/ready")).status_code == 200
    finally:
        await internal.stop()


async def test_a_taken_http_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            await process.InternalHttp(address, CollectorRegistry(), lambda: None).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_sets_the_event(number: signal.Signals) -> None:
    ended = []

    async def serve(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 10)
        ended.append(True)

    process.run(serve)
    assert ended == [True]


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(64, 256, 256), (256, 1 << 20, 1 << 14), (1 << 16, 1 << 20, 1 << 16)])
def test_a_process_may_open_as_many_files_as_it_may_hold_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))

    async def serve(_: asyncio.Event) -> None:
        assert limits[-1] == (allowed, hard)

    process.run(serve)
