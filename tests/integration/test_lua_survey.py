"""survey.lua: how things stand."""

from services.scheduler import keys
from services.scheduler.ledger import Survey
from tests.scheduler_harness import LedgerBench, make_ticket, make_worker


async def test_an_empty_redis_is_no_error(bench: LedgerBench) -> None:
    assert await bench.ledger.survey() == Survey({}, {}, 0)


async def test_queues_leases_and_what_is_served(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.beat(worker)
    await bench.place(make_ticket("placed"), worker)
    for i in range(3):
        await bench.queue(make_ticket(f"r{i}", latency_class=1))
    survey = await bench.ledger.survey()
    queue = keys.queue_name("tiny@fp32", 1, "acme")
    assert list(survey.queues) == [queue]
    num, oldest = survey.queues[queue]
    assert num == 3
    assert 0 <= oldest < 10
    assert list(survey.serving) == [("tiny@fp32", "v1")]
    assert survey.num_leases == 1
