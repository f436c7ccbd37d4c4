"""Where tickets go: where they displace least, then the least loaded; never too much on one; nobody waits for ever behind smaller ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy.classes import BATCH, REALTIME
from services.policy.org import OrgPolicy
from services.scheduler.policy.fleet import ServedModel, Worker, blocks_for, impossible, room, share_blocks
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import Placement, plan
from services.scheduler.policy.routing import ROUTINGS
from services.scheduler.policy.rules import Rules

LEAST_LOADED = Rules(routing=ROUTINGS["least_loaded"])
MODEL = ServedModel("v1", block_size=16, num_blocks=64, max_model_len=1024)


def _worker(worker_id: str = "w1", *, slots: int = 4, used_slots: int = 0, used_blocks: int = 0, model: ServedModel = MODEL) -> Worker:
    return Worker(worker_id, f"of {worker_id}", "host:1", slots, slots, {"tiny@fp32": model}, (0, 0, used_slots, 0), (0, 0, used_blocks, 0))


def _ticket(request_id: str = "r", *, prompt: int = 16, max_tokens: int = 16, n: int = 1, version: str = "v1", **more: object) -> Ticket:
    ticket = Ticket(request_id, "org", 2, "tiny@fp32", version, prompt, max_tokens, n)
    return replace(ticket, **more)  # type: ignore[arg-type]


def _plan(tickets: list[Ticket], workers: list[Worker], rules: Rules | None = None) -> list[Placement]:
    """In the order given, whatever class or org: `order` counts, and no class has had less than another. By load alone."""
    rules = rules or LEAST_LOADED
    numbered = [replace(ticket, order=order) for order, ticket in enumerate(tickets)]
    order = Order([Fifo([ticket]) for ticket in numbered], rules)
    return plan(order, workers, rules)


def _names(tickets: list[Ticket], workers: list[Worker], rules: Rules | None = None) -> list[tuple[str, str]]:
    return [(p.ticket.request_id, p.worker.worker_id) for p in _plan(tickets, workers, rules)]


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
    assert impossible(ticket, [_worker()], OrgPolicy()) is None
    (placement,) = _plan([ticket], [_worker()])
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


def test_room_for_a_class_is_what_is_free_and_what_lower_classes_hold_where_engines_preempt() -> None:
    worker = replace(_worker(slots=4), used_slots=(0, 0, 1, 3), used_blocks=(2, 0, 10, 40))
    assert room(worker, MODEL, 1, preemptible=False) == (0, 12)
    assert room(worker, MODEL, 1, preemptible=True) == (4, 62)
    assert room(worker, MODEL, 2, preemptible=True) == (3, 52)
    assert room(worker, MODEL, 3, preemptible=True) == (0, 12)


def test_what_fits_an_empty_worker_only_is_placed_on_an_empty_worker() -> None:
    ticket = _ticket(prompt=1000, max_tokens=24, n=2)
    assert [p.num_blocks for p in _plan([ticket], [_worker()])] == [64]
    assert _names([ticket], [_worker(used_blocks=1)]) == []
    many = _ticket(n=8)  # more choices than slots
    assert [p.num_slots for p in _plan([many], [_worker()])] == [4]
    assert _names([many], [_worker(used_slots=1)]) == []


def test_delivered_tokens_are_part_of_what_is_reserved() -> None:
    rules = Rules(output_estimate=16)
    fresh, moved = (_plan([_ticket(max_tokens=500, num_delivered_tokens=d)], [_worker()], rules)[0].num_blocks for d in (0, 160))
    assert (fresh, moved) == (2, 12)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300), st.integers(1, 4), st.integers(1, 3)), max_size=40),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 64)), min_size=1, max_size=4),
    st.sampled_from(sorted(ROUTINGS)),
)
def test_no_plan_ever_overfills_a_worker_or_places_a_ticket_twice(
    requests: list[tuple[int, int, int, int]], fleet: list[tuple[int, int, int]], routing: str
) -> None:
    workers = [
        _worker(f"w{i}", slots=slots, used_slots=min(used, slots), used_blocks=blocks) for i, (slots, used, blocks) in enumerate(fleet)
    ]
    tickets = [_ticket(f"r{i}", prompt=p, max_tokens=m, n=n, latency_class=c) for i, (p, m, n, c) in enumerate(requests)]
    placements = _plan(tickets, workers, Rules(routing=ROUTINGS[routing]))
    assert len({p.ticket.request_id for p in placements}) == len(placements)
    fleet_now = {worker.worker_id: worker for worker in workers}
    for p in placements:
        worker, c = fleet_now[p.worker.worker_id], p.ticket.latency_class
        slots, blocks = room(worker, MODEL, c, preemptible=True)
        assert p.num_slots <= slots
        assert p.num_blocks <= blocks
        fleet_now[worker.worker_id] = replace(
            worker,
            used_slots=tuple(used + p.num_slots * (i == c) for i, used in enumerate(worker.used_slots)),
            used_blocks=tuple(used + p.num_blocks * (i == c) for i, used in enumerate(worker.used_blocks)),
        )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 1000))
def test_a_big_ticket_is_placed_in_the_end_however_many_small_ones_come(sizes: list[int], big: int) -> None:
    """Each round one small lease ends and two small tickets come; strict order alone must get the big one in."""
    held: list[int] = []
    waiting = [_ticket(f"s{i}", prompt=16 * size) for i, size in enumerate(sizes)]
    waiting.insert(len(waiting) // 2, _ticket("big", prompt=big))
    for round_number in range(200):
        worker = _worker(slots=8, used_slots=len(held), used_blocks=sum(held))
        for placement in _plan(waiting, [worker]):
            if placement.ticket.request_id == "big":
                return
            held.append(placement.num_blocks)
            waiting = [ticket for ticket in waiting if ticket.request_id != placement.ticket.request_id]
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
    problem = impossible(ticket, [_worker(model=replace(MODEL, max_model_len=256)), _worker("w2")], OrgPolicy())
    assert problem is not None
    assert problem[0] == field
    assert all(number in problem[1] for number in numbers)


def test_what_one_worker_could_hold_when_empty_is_not_impossible() -> None:
    workers = [_worker(used_blocks=64), _worker(model=replace(MODEL, max_model_len=100))]
    assert impossible(_ticket(prompt=1000, max_tokens=24), workers, OrgPolicy()) is None
    assert impossible(_ticket(prompt=5000, version="v2"), [_worker()], OrgPolicy()) is None, "nobody serves it: another matter"


# Room by class.


def _of_class(latency_class: int, request_id: str = "r", **more: object) -> Ticket:
    return _ticket(request_id, latency_class=latency_class, **more)  # type: ignore[arg-type]


def _holding(worker_id: str, *, realtime: int = 0, standard: int = 0, batch: int = 0, waiting_places: int = 2) -> Worker:
    """A worker of 4 slots and 64 blocks whose leases hold 10 blocks each."""
    slots = (0, realtime, standard, batch)
    blocks = tuple(10 * used for used in slots)
    return Worker(worker_id, f"of {worker_id}", "host:1", 4, 4 + waiting_places, {"tiny@fp32": MODEL}, slots, blocks)


def test_realtime_goes_to_a_full_worker_and_the_others_wait() -> None:
    tickets = [_of_class(BATCH, "b"), _of_class(2, "s"), _of_class(REALTIME, "r")]
    assert _names(tickets, [_holding("w1", batch=6)]) == [("r", "w1"), ("s", "w1")]
    assert _names(tickets, [_holding("w1", standard=6)]) == [("r", "w1")]
    assert _names(tickets, [_holding("w1", realtime=6)]) == []
    assert _names(tickets, [_holding("w1", batch=6)], Rules(preemptible=False)) == []


def test_slots_and_waiting_places_bound_a_class_and_those_above_it() -> None:
    tickets = [_of_class(REALTIME, f"r{i}") for i in range(9)]
    assert len(_names(tickets, [_holding("w1", batch=6)])) == 6
    assert len(_names(tickets, [_holding("w1", realtime=2, batch=4)])) == 4


def test_the_worker_is_taken_that_preempts_least() -> None:
    realtime = [_of_class(REALTIME)]
    assert _names(realtime, [_holding("w1", batch=5), _holding("w2", standard=3)]) == [("r", "w2")], "a free slot"
    assert _names(realtime, [_holding("w1", realtime=4), _holding("w2", batch=6)]) == [("r", "w2")], "rather than wait for a slot"
    assert _names(realtime, [_holding("w1", realtime=2, batch=4), _holding("w2", batch=6)]) == [("r", "w2")], "fewer rivals"
    tight = replace(_holding("w1", batch=3), used_blocks=(0, 0, 0, 64))
    assert _names(realtime, [tight, _holding("w2", batch=3)]) == [("r", "w2")], "free blocks"
    assert _names(realtime, [replace(tight, used_slots=(0, 0, 0, 1)), _holding("w2", batch=3)]) == [("r", "w2")], "blocks before load"
    crowded = replace(_holding("w1", realtime=4), used_blocks=(0, 4, 0, 0))
    full = replace(_holding("w2", batch=6), used_blocks=(0, 0, 0, 64))
    assert _names(realtime, [crowded, full]) == [("r", "w2")], "to wait is worse than to take slots and blocks"


def test_what_a_big_batch_ticket_waits_for_is_closed_to_batch_alone() -> None:
    worker = replace(_worker(slots=8), used_slots=(0, 0, 0, 1), used_blocks=(0, 0, 0, 40))
    tickets = [_of_class(BATCH, "big", prompt=600, waited_seconds=200), _of_class(BATCH, "small"), _of_class(REALTIME, "now")]
    assert _names(tickets, [worker]) == [("now", "w1")]


def test_what_a_class_below_its_floor_share_waits_for_is_closed_to_all() -> None:
    worker = replace(_worker(slots=8), used_slots=(0, 1, 0, 0), used_blocks=(0, 40, 0, 0))
    fifos = [Fifo([_of_class(BATCH, "big", prompt=600)]), Fifo([_of_class(REALTIME, "now")])]
    rules = Rules()
    assert plan(Order(fifos, rules, {"tiny@fp32": [0, 1000, 0, 0]}), [worker], rules) == []
    placed = plan(Order(fifos, rules, {"tiny@fp32": [0, 600, 300, 100]}), [worker], rules)
    assert [placement.ticket.request_id for placement in placed] == ["now"]


# An org's share of a worker's blocks.

HALF = Rules(org=lambda org: OrgPolicy(kv_share=0.5 if org == "org" else 1.0))


def test_an_org_takes_no_more_than_its_share_of_each_worker() -> None:
    tickets = [_ticket(f"r{i}", prompt=160) for i in range(9)]  # 11 blocks each
    assert _names(tickets, [_worker("w1", slots=9), _worker("w2", slots=9)], HALF) == [
        ("r0", "w1"),
        ("r1", "w2"),
        ("r2", "w1"),
        ("r3", "w2"),
    ]
    held = replace(_worker("w1", slots=9), org_blocks={"org": 25})
    assert _names(tickets, [held], HALF) == []
    assert len(_names([replace(ticket, org="other") for ticket in tickets], [held], HALF)) == 5


def test_an_org_that_is_at_its_share_holds_up_nobody_but_itself() -> None:
    full = replace(_worker(slots=9), org_blocks={"org": 25})
    tickets = [_ticket("big", prompt=160), _ticket("small", max_tokens=1), _ticket("other", org="other", prompt=600)]
    assert _names(tickets, [full], HALF) == [("other", "w1")], "its small one would keep its big one waiting"


def test_what_an_orgs_share_could_never_hold_is_refused_with_its_numbers() -> None:
    share = OrgPolicy(kv_share=0.25)
    assert share_blocks(64, share) == 16
    assert impossible(_ticket(prompt=240, max_tokens=16), [_worker()], share) is None
    problem = impossible(_ticket(prompt=240, max_tokens=17), [_worker()], share)
    assert problem is not None
    assert problem[0] == "max_tokens"
    assert all(number in problem[1] for number in ("240", "17", "257", "256", "0.25"))


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(1, 3), st.sampled_from("xyz")), max_size=40), st.integers(1, 9)
)
def test_no_plan_ever_takes_more_than_an_orgs_share(requests: list[tuple[int, int, int, str]], tenths: int) -> None:
    rules = Rules(org=lambda org: OrgPolicy(kv_share=tenths / 10 if org == "x" else 1.0))
    tickets = [_ticket(f"r{i}", prompt=p, n=n, latency_class=c, org=org) for i, (p, n, c, org) in enumerate(requests)]
    blocks = {"w1": 0, "w2": 0}
    for placement in _plan(tickets, [_worker("w1", slots=40), _worker("w2", slots=40)], rules):
        if placement.ticket.org == "x":
            blocks[placement.worker.worker_id] += placement.num_blocks
    assert max(blocks.values()) <= 64 * tenths // 10


def test_a_placement_counts_on_free_room_or_on_what_others_hold() -> None:
    def where(ticket: Ticket, worker: Worker) -> str:
        (placement,) = _plan([ticket], [worker])
        return placement.counts_on

    assert where(_ticket(), _worker(used_slots=3)) == "free"
    full_of_batch = replace(_worker(), used_slots=(0, 0, 0, 4), used_blocks=(0, 0, 0, 60))
    assert where(_ticket(latency_class=REALTIME), full_of_batch) == "preempts"
    assert where(_ticket(), replace(_worker(used_slots=4), max_slots=6)) == "waits"
