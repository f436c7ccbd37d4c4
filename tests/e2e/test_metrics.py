"""Every process's metrics while one of them dies: answers go on, counters only grow, and what the dead one was told by is gone."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.cli.home import Home
from tests.e2e.mesh import Mesh, running, wait_until

Samples = dict[str, float]
_COUNTER = re.compile(r"(_total|_bucket|_count)(\{|$)")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Mesh]:
    with running(tmp_path / "home", "--workers", "2") as mesh:
        yield mesh


def scrape(address: str) -> Samples:
    """A process's samples; asserts that it answers."""
    answer = httpx.get(f"http://{address}/metrics", timeout=10)
    assert answer.status_code == 200, answer.text
    rows = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def fallen(before: Samples, after: Samples) -> list[str]:
    """Counters that are less than they were, or gone."""
    return [name for name, value in before.items() if _COUNTER.search(name) and after.get(name, -1) < value]


def heartbeat_ages(samples: Samples) -> list[str]:
    return [name for name in samples if name.startswith("forebay_worker_heartbeat_age_seconds")]


def test_b42d_a_dead_worker_leaves_no_gauge_and_disturbs_no_scrape(pair: Mesh) -> None:
    addresses = Home(pair.home).read().internal_addresses  # type: ignore[union-attr]  # it is up
    assert set(addresses) == {"gateway", "scheduler", "worker-1", "worker-2"}
    others = {name: address for name, address in addresses.items() if name != "worker-1"}
    with pair.operator() as operator:
        operator.wait_until(lambda fleet: sum(worker.ready for worker in fleet.workers) == 2, "both are ready")
    stop = threading.Event()
    asked: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=pair.http_base_url, headers={"authorization": f"Bearer {pair.token}"}, timeout=60) as client:
            while not stop.is_set():
                asked.append(client.post("/completions", json={"prompt": "One, two,", "max_tokens": 8}).status_code)

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        wait_until(lambda: len(asked) > 4, "requests are answered")
        before = {name: scrape(address) for name, address in addresses.items()}
        assert len(heartbeat_ages(before["scheduler"])) == 2
        os.kill(pair.processes["worker-1"], signal.SIGKILL)
        seen_alone = False
        last = {name: before[name] for name in others}

        def is_back() -> bool:
            nonlocal seen_alone
            for name, address in others.items():
                samples = scrape(address)
                assert fallen(last[name], samples) == []
                last[name] = samples
            seen_alone |= len(heartbeat_ages(last["scheduler"])) == 1
            return seen_alone and len(heartbeat_ages(last["scheduler"])) == 2

        wait_until(is_back, "the dead worker's gauge is gone, and its successor's is there", seconds=60)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert set(asked) == {200}
    assert scrape(addresses["worker-1"])["process_start_time_seconds"] > before["worker-1"]["process_start_time_seconds"]
