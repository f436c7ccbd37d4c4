"""down.lua: a worker whose stream broke takes nothing until it is heard of again."""

from tests.scheduler_harness import LedgerBench, make_worker


async def test_down_until_the_next_heartbeat(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.ledger.register("w1", "i1")
    assert await bench.ledger.down("w1", "i1")
    assert await bench.used(worker) is None
    await bench.beat(worker)
    assert await bench.used(worker) == (0, 0)


async def test_an_old_incarnations_stream_says_nothing_about_the_new_one(bench: LedgerBench) -> None:
    await bench.ledger.register("w1", "i2")
    assert not await bench.ledger.down("w1", "i1")
    assert await bench.used(make_worker(incarnation="i2")) == (0, 0)
