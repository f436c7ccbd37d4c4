"""enqueue.lua: queues a ticket once, says where it stands, brings it back to its old place."""

from dataclasses import replace

import pytest

from services.common.errors import StatusError
from services.scheduler import keys
from services.scheduler.ledger import Expired, Finished, Full, Lease, Queued
from tests.scheduler_harness import LedgerBench, ledger_bench, make_ticket, make_worker


async def test_tickets_queue_in_the_order_of_arrival(bench: LedgerBench) -> None:
    tickets = [await bench.queue(make_ticket(f"r{i}")) for i in range(5)]
    assert await bench.waiting() == [ticket.request_id for ticket in tickets]
    assert [ticket.order for ticket in tickets] == sorted({ticket.order for ticket in tickets})


async def test_queueing_again_changes_nothing_but_the_holder(bench: LedgerBench) -> None:
    first = await bench.queue(make_ticket("a"), "h1")
    await bench.queue(make_ticket("b"))
    again = await bench.enqueue(make_ticket("a"), "h2")
    assert isinstance(again, Queued)
    assert again.order == first.order
    assert await bench.waiting() == ["a", "b"]
    assert await bench.raw("HGET", keys.ticket("a"), "holder") == "h2"


async def test_a_placed_ticket_answers_the_same_lease(bench: LedgerBench) -> None:
    lease = await bench.place(make_ticket("a"), make_worker())
    assert await bench.enqueue(make_ticket("a"), "h2") == lease
    assert lease.epoch == 1


async def test_a_lost_epoch_ends_the_lease_and_brings_the_ticket_back_to_its_old_place(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.queue(make_ticket("b"))
    back = await bench.enqueue(make_ticket("a", excluded_workers=frozenset({"w1"})), lost_epoch=1)
    assert isinstance(back, Queued)
    assert await bench.waiting() == ["a", "b"]
    assert await bench.used(worker) == (0, 0)
    again = await bench.commit(make_ticket("a"), worker)
    assert isinstance(again, Lease)
    assert (lease.epoch, again.epoch) == (1, 2)
    assert await bench.enqueue(make_ticket("a"), lost_epoch=1) == again, "the epoch that was lost is not this one"


async def test_a_worker_that_refused_takes_nothing_until_its_next_heartbeat(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    await bench.enqueue(make_ticket("a"), lost_epoch=1)
    assert await bench.used(worker) is None
    assert await bench.commit(make_ticket("a"), worker) == "refusing"
    await bench.beat(worker)
    assert isinstance(await bench.commit(make_ticket("a"), worker), Lease)


async def test_a_worker_that_one_gateway_cannot_reach_serves_the_others(bench: LedgerBench) -> None:
    worker = make_worker()
    await bench.place(make_ticket("a"), worker)
    await bench.enqueue(make_ticket("a", excluded_workers=frozenset({"w1"})), lost_epoch=1)
    assert await bench.used(worker) == (0, 0)


async def test_losing_a_lease_that_had_started_says_nothing_about_the_workers_room(bench: LedgerBench) -> None:
    worker = make_worker()
    lease = await bench.place(make_ticket("a"), worker)
    await bench.beat(worker, lease, used=2)
    await bench.enqueue(make_ticket("a"), lost_epoch=1)
    assert await bench.used(worker) == (0, 0)


async def test_a_finished_request_is_not_run_again(bench: LedgerBench) -> None:
    await bench.place(make_ticket("a"), make_worker())
    assert await bench.finish("a", 1, 5) == (True, keys.line_name("tiny@fp32", 2))
    assert await bench.enqueue(make_ticket("a")) == Finished()
    assert await bench.enqueue(make_ticket("a"), lost_epoch=1) == Finished()


async def test_a_full_queue_refuses_new_tickets_but_none_that_come_back(redis_server) -> None:
    async with ledger_bench(redis_server.url, max_queued=2) as bench:
        await bench.place(make_ticket("a"), make_worker())
        await bench.queue(make_ticket("b"))
        await bench.queue(make_ticket("c"))
        assert await bench.enqueue(make_ticket("d")) == Full(2)
        assert isinstance(await bench.enqueue(make_ticket("e", model="other@fp32")), Queued), "another model has its own queue"
        assert isinstance(await bench.enqueue(make_ticket("a"), lost_epoch=1), Queued)
        assert isinstance(await bench.enqueue(make_ticket("b")), Queued)


async def test_a_ticket_that_redis_forgot_keeps_its_order_and_epoch(bench: LedgerBench) -> None:
    """Case F10: after a flush, the holder of the stream queues it again."""
    first = await bench.queue(make_ticket("first"))
    await bench.raw("FLUSHALL")
    await bench.queue(make_ticket("later"))
    await bench.enqueue(first, lost_epoch=3)
    assert await bench.waiting() == ["first", "later"]
    worker = make_worker()
    await bench.ledger.register(worker.worker_id, worker.incarnation)
    lease = await bench.commit(first, worker)
    assert isinstance(lease, Lease)
    assert lease.epoch == 4


async def test_order_never_goes_back_even_if_the_clock_does(bench: LedgerBench) -> None:
    """Case F23."""
    first = await bench.queue(make_ticket("a"))
    await bench.raw("SET", keys.PREFIX + "order", first.order + 3_600_000_000)
    second, third = await bench.queue(make_ticket("b")), await bench.queue(make_ticket("c"))
    assert (second.order, third.order) == (first.order + 3_600_000_001, first.order + 3_600_000_002)


async def test_the_deadline_counts_from_the_first_call(bench: LedgerBench) -> None:
    await bench.enqueue(make_ticket("a"), deadline_seconds=5)
    again = await bench.enqueue(make_ticket("a"), deadline_seconds=50)
    assert isinstance(again, Queued)
    assert again.left_seconds <= 5


async def test_names_with_odd_characters_are_kept_apart(bench: LedgerBench) -> None:
    names = ["a:b", 'a"b', "a b", "ä\x00\n", "a*"]
    for i, org in enumerate(names):
        await bench.queue(make_ticket(f"r{i}", org=org))
    survey = await bench.ledger.survey()
    assert sorted(keys.parse_queue(queue)[2] for queue in survey.queues) == sorted(names)
    fifos = (await bench.view(await _registered(bench))).fifos
    assert sorted(fifo.tickets[0].org for fifo in fifos) == sorted(names)


async def _registered(bench: LedgerBench):
    await bench.ledger.register("w1", "i1")
    return make_worker()


async def test_what_a_ticket_says_is_what_the_policy_sees(bench: LedgerBench) -> None:
    ticket = make_ticket("a", latency_class=3, num_prompt_tokens=77, max_tokens=9, n=3, excluded_workers=frozenset({"x", "y"}))
    ticket = await bench.queue(replace(ticket, num_delivered_tokens=4))
    (fifo,) = (await bench.view(await _registered(bench))).fifos
    (seen,) = fifo.tickets
    assert replace(seen, asked_seconds=0, waited_seconds=0) == ticket
    assert 0 <= seen.waited_seconds < 10


async def _fill(bench: LedgerBench, *tickets: tuple[str, int, str]) -> None:
    for request_id, latency_class, org in tickets:
        await bench.queue(make_ticket(request_id, latency_class=latency_class, org=org))


async def test_a_more_urgent_arrival_takes_the_place_of_the_newest_of_the_least_urgent_class(redis_server) -> None:
    async with ledger_bench(redis_server.url, max_queued=5) as bench:
        await _fill(bench, ("b1", 3, "x"), ("s1", 2, "x"), ("b2", 3, "y"), ("b3", 3, "x"), ("r1", 1, "x"))
        waiting = {"b1", "s1", "b2", "b3", "r1"}
        for newcomer, latency_class, victim in (("s2", 2, "b3"), ("r2", 1, "b2"), ("r3", 1, "b1"), ("r4", 1, "s2"), ("r5", 1, "s1")):
            await _fill(bench, (newcomer, latency_class, "z"))
            waiting = (waiting | {newcomer}) - {victim}
            assert set(await bench.waiting()) == waiting
            assert await bench.raw("HGET", keys.ticket(victim), "reason") == "shed"
        assert await bench.enqueue(make_ticket("r6", latency_class=1)) == Full(5), "nothing less urgent is left"
        assert await bench.enqueue(make_ticket("s3", latency_class=2)) == Full(5)
        assert set(await bench.waiting()) == waiting


async def test_an_arrival_of_the_least_urgent_class_is_refused_itself_and_leaves_nothing_behind(redis_server) -> None:
    async with ledger_bench(redis_server.url, max_queued=2) as bench:
        await _fill(bench, ("s1", 2, "x"), ("b1", 3, "x"))
        for _ in range(50):  # Case F24: a storm of retries asks for nothing but the answer.
            assert await bench.enqueue(make_ticket("b2", latency_class=3)) == Full(2)
        assert await bench.waiting() == ["s1", "b1"]
        assert await bench.raw("EXISTS", keys.ticket("b2")) == 0


async def test_a_stream_that_missed_that_its_ticket_was_shed_hears_of_it_and_a_retry_is_a_new_arrival(redis_server) -> None:
    async with ledger_bench(redis_server.url, max_queued=1) as bench:
        shed = await bench.queue(make_ticket("b", latency_class=3))
        await bench.queue(make_ticket("r", latency_class=1))
        assert await bench.enqueue(shed) == Full(1, shed=True), "its order is known: the stream asks again"
        assert await bench.enqueue(replace(shed, order=0)) == Full(1)
        await bench.ledger.withdraw("r", "h", "withdrawn")
        assert isinstance(await bench.enqueue(replace(shed, order=0)), Queued)


async def test_a_deadline_that_has_passed_is_said_at_once(bench: LedgerBench) -> None:
    assert await bench.enqueue(make_ticket("a"), deadline_seconds=0) == Expired()
    assert await bench.raw("EXISTS", keys.ticket("a")) == 0
    await bench.queue(make_ticket("b"))
    await bench.raw("HSET", keys.ticket("b"), "deadline", 1)
    assert await bench.enqueue(make_ticket("b"), "h2") == Expired()


async def test_a_redis_without_memory_refuses_a_new_ticket_whole(redis_server) -> None:
    """A script that has written anything may go on without memory: it would queue what can't be placed, and no one could tell."""
    async with ledger_bench(redis_server.url) as bench:
        redis_server.command("CONFIG SET maxmemory 1")
        with pytest.raises(StatusError) as caught:
            await bench.enqueue(make_ticket("a"))
        assert caught.value.reason == "STORE_UNAVAILABLE"
        redis_server.command("CONFIG SET maxmemory 0")
        assert redis_server.command(f"EXISTS {keys.ticket('a')}") == b":0\r\n"
