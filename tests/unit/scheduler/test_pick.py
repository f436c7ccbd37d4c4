"""Where tickets go: the least loaded worker with room; never too much on one; nobody waits for ever behind smaller ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.order import Ticket
from services.scheduler.policy.pick import Rules, ServedModel, Worker, blocks_for, impossible, plan, room

MODEL = ServedModel("v1", block_size=16, num_blocks=64, max_model_len=1024)


def _worker(worker_id: str = "w1", *, slots: int = 4, used_slots: int = 0, used_blocks: int = 0, model: ServedModel = MODEL) -> Worker:
    return Worker(worker_id, "i1", "host:1", slots, slots, {"tiny@fp32": model}, (0, 0, used_slots, 0), (0, 0, used_blocks, 0))


def _ticket(request_id: str = "r", *, prompt: int = 16, max_tokens: int = 16, n: int = 1, version: str = "v1", **more: object) -> Ticket:
    ticket = Ticket(request_id, "org", 2, "tiny@fp32", version, prompt, max_tokens, n)
    return replace(ticket, **more)  # type: ignore[arg-type]


def _names(tickets: list[Ticket], workers: list[Worker], rules: Rules | None = None) -> list[tuple[str, str]]:
    return [(p.ticket.request_id, p.worker.worker_id) for p in plan(tickets, workers, rules or Rules())]


@pytest.mark.parametrize(
    ("prompt", "output", "n", "blocks"),
    [(16, 0, 1, 1), (16, 1, 1, 2), (15, 1, 1, 1), (17, 1, 4, 1 + 4), (32, 16, 2, 2 + 2), (1, 1, 1, 1)],
)
def test_choices_share_the_full_blocks_of_the_prompt(prompt: int, output: int, n: int, blocks: int) -> None:
    assert blocks_for(16, prompt, output, n) == blocks


def test_the_least_loaded_worker_is_taken_and_what_was_just_sent_counts() -> None:
    workers = [_worker("w1", used_slots=2), _worker("w2"), _worker("w3", used_slots=1)]
    placed = _names([_ticket(f"r{i}") for i in range(4)], workers)
    assert placed == [("r0", "w2"), ("r1", "w3"), ("r2", "w2"), ("r3", "w1")]


def test_another_version_or_model_is_no_candidate() -> None:
    assert _names([_ticket(version="v2"), _ticket(model="other@fp32")], [_worker()]) == []
    assert _names([_ticket(version="")], [_worker()]) == [("r", "w1")]


def test_a_worker_that_could_not_hold_the_whole_ticket_is_no_candidate() -> None:
    workers = [_worker("w1", model=replace(MODEL, max_model_len=256)), _worker("w3", used_slots=3)]
    assert _names([_ticket(prompt=16, max_tokens=300)], workers) == [("r", "w3")]
    assert _names([_ticket(prompt=200, max_tokens=57)], workers) == [("r", "w3")]
    assert _names([_ticket(prompt=16, max_tokens=240)], workers) == [("r", "w1")]


def test_choices_that_do_not_fit_side_by_side_are_no_reason_to_refuse() -> None:
    """An engine runs them one after another; the ticket takes the whole worker."""
    ticket = _ticket(prompt=1000, max_tokens=24, n=16)
    assert impossible(ticket, [_worker()]) is None
    (placement,) = plan([ticket], [_worker()], Rules())
    assert (placement.num_slots, placement.num_blocks) == (4, 64)


def test_excluded_workers_are_left_out_while_there_are_others() -> None:
    ticket = _ticket(excluded_workers=frozenset({"w1"}))
    assert _names([ticket], [_worker("w1"), _worker("w2", used_slots=3)]) == [("r", "w2")]
    assert _names([ticket], [_worker("w1")]) == []
    assert _names([replace(ticket, asked_seconds=1.5)], [_worker("w1")]) == [("r", "w1")]


def test_a_ticket_without_a_reachable_worker_holds_nobody_up() -> None:
    assert _names([_ticket("a", excluded_workers=frozenset({"w1"})), _ticket("b")], [_worker("w1")]) == [("b", "w1")]


def test_a_big_ticket_keeps_one_worker_and_small_ones_use_the_others() -> None:
    workers = [_worker("w1", used_blocks=40), _worker("w2", used_blocks=60)]
    tickets = [_ticket("big", prompt=600), _ticket("small1"), _ticket("small2"), _ticket("small3")]
    assert _names(tickets, workers) == [("small1", "w2"), ("small2", "w2")]


def test_room_for_a_class_is_what_is_free_until_engines_preempt_by_class() -> None:
    worker = replace(_worker(slots=4), used_slots=(0, 0, 1, 3), used_blocks=(2, 0, 10, 40))
    assert room(worker, MODEL, 1) == (0, 12)
    assert room(worker, MODEL, 1, preemptible=True) == (4, 62)
    assert room(worker, MODEL, 2, preemptible=True) == (3, 52)
    assert room(worker, MODEL, 3, preemptible=True) == (0, 12)


def test_what_fits_an_empty_worker_only_is_placed_on_an_empty_worker() -> None:
    ticket = _ticket(prompt=1000, max_tokens=24, n=2)
    assert [p.num_blocks for p in plan([ticket], [_worker()], Rules())] == [64]
    assert _names([ticket], [_worker(used_blocks=1)]) == []
    many = _ticket(n=8)  # more choices than slots
    assert [p.num_slots for p in plan([many], [_worker()], Rules())] == [4]
    assert _names([many], [_worker(used_slots=1)]) == []


def test_delivered_tokens_are_part_of_what_is_reserved() -> None:
    rules = Rules(output_estimate=16)
    fresh, moved = (plan([_ticket(max_tokens=500, num_delivered_tokens=d)], [_worker()], rules)[0].num_blocks for d in (0, 160))
    assert (fresh, moved) == (2, 12)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300), st.integers(1, 4), st.integers(1, 3)), max_size=40),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 64)), min_size=1, max_size=4),
)
def test_no_plan_ever_overfills_a_worker_or_places_a_ticket_twice(
    requests: list[tuple[int, int, int, int]], fleet: list[tuple[int, int, int]]
) -> None:
    workers = [
        _worker(f"w{i}", slots=slots, used_slots=min(used, slots), used_blocks=blocks) for i, (slots, used, blocks) in enumerate(fleet)
    ]
    tickets = [_ticket(f"r{i}", prompt=p, max_tokens=m, n=n, latency_class=c) for i, (p, m, n, c) in enumerate(requests)]
    placements = plan(tickets, workers, Rules())
    assert len({p.ticket.request_id for p in placements}) == len(placements)
    for worker in workers:
        mine = [p for p in placements if p.worker.worker_id == worker.worker_id]
        assert sum(worker.used_slots) + sum(p.num_slots for p in mine) <= worker.max_slots
        assert sum(worker.used_blocks) + sum(p.num_blocks for p in mine) <= MODEL.num_blocks


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 1000))
def test_a_big_ticket_is_placed_in_the_end_however_many_small_ones_come(sizes: list[int], big: int) -> None:
    """Each round one small lease ends and two small tickets come; strict order alone must get the big one in."""
    held: list[int] = []
    waiting = [_ticket(f"s{i}", prompt=16 * size) for i, size in enumerate(sizes)]
    waiting.insert(len(waiting) // 2, _ticket("big", prompt=big))
    for round_number in range(200):
        worker = _worker(slots=8, used_slots=len(held), used_blocks=sum(held))
        for placement in plan(waiting, [worker], Rules()):
            if placement.ticket.request_id == "big":
                return
            held.append(placement.num_blocks)
            waiting.remove(placement.ticket)
        held = held[1:]
        waiting += [_ticket(f"n{round_number}{i}") for i in range(2)]
    raise AssertionError("the big ticket starves")


@pytest.mark.parametrize(
    ("ticket", "field", "numbers"),
    [
        (_ticket(prompt=1025), "prompt", ("1025", "1024")),
        (_ticket(prompt=1000, max_tokens=25), "max_tokens", ("1000", "25", "1025", "1024", "24")),
    ],
    ids=["prompt over the context", "max_tokens over the context"],
)
def test_what_no_worker_could_hold_is_refused_with_its_numbers(ticket: Ticket, field: str, numbers: tuple[str, ...]) -> None:
    """Case B23: refused at admission, not left at the head of the queue."""
    problem = impossible(ticket, [_worker(model=replace(MODEL, num_blocks=16)), _worker("w2")])
    assert problem is not None
    assert problem[0] == field
    assert all(number in problem[1] for number in numbers)


def test_what_one_worker_could_hold_when_empty_is_not_impossible() -> None:
    assert (
        impossible(_ticket(prompt=1000, max_tokens=24), [_worker(used_blocks=64), _worker(model=replace(MODEL, max_model_len=100))]) is None
    )
    assert impossible(_ticket(prompt=5000, version="v2"), [_worker()]) is None, "nobody serves it: another matter"
