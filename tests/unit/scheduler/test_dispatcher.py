"""When the dispatcher looks: as often as there may be something to place, and no oftener."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from services.scheduler.dispatcher import Dispatcher
from services.scheduler.ledger import Lease, View
from services.scheduler.metrics import Metrics
from services.scheduler.policy.fleet import ServedModel, Worker
from services.scheduler.policy.order import Fifo, Ticket
from services.scheduler.policy.pick import Placement
from services.scheduler.policy.rules import Rules
from tests.scheduler_harness import until

MODEL = ServedModel("v1", block_size=16, num_blocks=64, max_model_len=1024)
WORKER = Worker("w1", "of w1", "host:1", 8, 8, {"tiny@fp32": MODEL})


class FakeLedger:
    """What waits, which is placed as the policy says but for what `loses`. Counts looks."""

    def __init__(self, num_tickets: int, *, most: int = 64, loses: Sequence[str] = ()) -> None:
        self._waiting = [Ticket(f"r{n}", "org", 2, "tiny@fp32", "v1", 16, 16, 1, order=n) for n in range(num_tickets)]
        self._most = most
        self._loses = set(loses)
        self.num_views = 0

    async def view(self, workers: Sequence[Worker], _: int, *, preemptible: bool) -> View:
        self.num_views += 1
        return View(list(workers), [Fifo(self._waiting[: self._most], cut=len(self._waiting) > self._most)], {})

    async def commit(self, placements: Sequence[Placement], _: Rules) -> list[Lease | str]:
        outcomes: list[Lease | str] = []
        for placement in placements:
            name = placement.ticket.request_id
            if name in self._loses:
                self._loses.remove(name)
                outcomes.append("gone")
                continue
            self._waiting = [ticket for ticket in self._waiting if ticket.request_id != name]
            outcomes.append(Lease(name, 1, placement.worker.worker_id, placement.worker.incarnation, placement.worker.address, 0.0))
        return outcomes


class OneWorker:
    """A registry."""

    def usable(self, _: float) -> list[Worker]:
        """That one."""
        return [WORKER]


def dispatcher_of(ledger: FakeLedger, placed: list[str]) -> Dispatcher:
    """It notes what it placed."""
    registry: Any = OneWorker()
    return Dispatcher(
        cast("Any", ledger), registry, Rules, Metrics(), poll_seconds=60, delivered=lambda lease, _: placed.append(lease.request_id)
    )


@pytest.mark.parametrize(
    ("ledger", "num_views"),
    [
        (FakeLedger(1), 1),  # all that waited has a lease
        (FakeLedger(5), 1),
        (FakeLedger(3, most=2), 2),  # more wait than were seen
        (FakeLedger(2, loses=["r1"]), 2),  # one lost its race, another didn't
        (FakeLedger(0), 1),
    ],
)
async def test_it_looks_again_where_there_may_be_more(ledger: FakeLedger, num_views: int) -> None:
    placed: list[str] = []
    dispatcher = dispatcher_of(ledger, placed)
    num_tickets = len(ledger._waiting)
    running = asyncio.create_task(dispatcher.run())
    dispatcher.wake()
    await until(lambda: len(placed) == num_tickets and ledger.num_views > 0)
    for _ in range(20):  # it would look again now
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert ledger.num_views == num_views
    assert sorted(placed) == [f"r{n}" for n in range(num_tickets)]


async def test_what_comes_while_it_looks_is_seen_soon() -> None:
    ledger = FakeLedger(0)
    placed: list[str] = []
    dispatcher = dispatcher_of(ledger, placed)
    running = asyncio.create_task(dispatcher.run())
    for number in range(3):
        ledger._waiting = [Ticket(f"r{number}", "org", 2, "tiny@fp32", "v1", 16, 16, 1)]
        dispatcher.wake()
        await until(lambda: len(placed) > number)  # noqa: B023  # read at once
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert placed == ["r0", "r1", "r2"]
