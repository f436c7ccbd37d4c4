"""touch.lua: keeps tickets of living streams, and tells streams what they don't know."""

from services.scheduler.ledger import News
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker, until


async def test_a_touched_ticket_is_not_swept(bench: LedgerBench) -> None:
    for name in ("kept", "left"):
        await bench.queue(make_ticket(name))
    swept: list[str] = []

    async def left_is_swept() -> bool:
        assert await bench.ledger.touch([("kept", "h")]) == []
        swept.extend(ended.request_id for ended in await bench.ledger.sweep())
        return "left" in swept

    await until(left_is_swept)
    assert swept == ["left"]
    assert await bench.waiting() == ["kept"]


async def test_streams_hear_of_leases_losses_and_newer_streams(bench: LedgerBench) -> None:
    lease = await bench.place(make_ticket("placed"), make_worker())
    await bench.queue(make_ticket("taken"), "newer")
    await bench.queue(make_ticket("dropped"))
    await bench.ledger.withdraw("dropped", "h", "dropped")
    await bench.queue(make_ticket("waits"))
    names = ["placed", "taken", "dropped", "waits", "unheard of"]
    assert await bench.ledger.touch([(name, "h") for name in names]) == [
        News("placed", "placed", lease),
        News("taken", "superseded"),
        News("dropped", "missing"),
        News("unheard of", "missing"),
    ]
    assert await bench.ledger.touch([]) == []
