"""What was sent where is found again by its beginnings, bounded as the worker's cache is; and a prompt goes where its beginning is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy import prefix_index
from services.scheduler.policy.fleet import Worker
from services.scheduler.policy.memory import Memory
from services.scheduler.policy.order import Fifo, Order, Ticket
from services.scheduler.policy.pick import plan
from services.scheduler.policy.prefix_index import PrefixIndex
from services.scheduler.policy.routing import ROUTINGS
from services.scheduler.policy.rules import Rules
from tests.scheduler_harness import make_ticket, make_worker

LARGE = 1 << 20
PREFIX = Rules(routing=ROUTINGS["prefix"])


def _ticket(request_id: str, *numbers: int, prompt: int = 200) -> Ticket:
    """Each number stands for 16 tokens; equal beginnings have equal hashes."""
    hashes = [f"{abs(hash(numbers[: i + 1])):016x}" for i in range(len(numbers))]
    return make_ticket(request_id, num_prompt_tokens=prompt, block_hashes="".join(hashes), hash_tokens=16)


def _place(index: PrefixIndex, ticket: Ticket, workers: list[Worker], rules: Rules | None = None) -> str:
    rules = rules or PREFIX
    (placement,) = plan(Order([Fifo([ticket])], rules), workers, rules, Memory(index))
    return placement.worker.worker_id


def _found(index: PrefixIndex, ticket: Ticket) -> dict[str, int]:
    prefix = index.look_up(ticket)
    return {incarnation: tokens for incarnation in index._held if (tokens := prefix.tokens(incarnation))}


def test_what_was_sent_is_found_as_far_as_it_is_alike() -> None:
    index = PrefixIndex()
    index.sent(_ticket("a", 1, 2, 3), "i1", LARGE)
    index.sent(_ticket("b", 1, 2, 4), "i2", LARGE)
    assert _found(index, _ticket("c", 1, 2, 3, 9)) == {"i1": 48, "i2": 32}
    assert _found(index, _ticket("d", 7)) == _found(index, make_ticket()) == {}


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.sampled_from("xyz")), max_size=60), st.integers(1, 8))
def test_a_worker_is_never_thought_to_have_more_than_its_cache_holds(sent: list[tuple[list[int], str]], blocks: int) -> None:
    index = PrefixIndex()
    for numbers, incarnation in sent:
        index.sent(_ticket("r", *numbers), incarnation, blocks * 16)
        assert all(len(held) <= blocks for held in index._held.values())
        assert index.look_up(_ticket("again", *numbers)).tokens(incarnation) == 16 * min(len(numbers), blocks), "the head outlives the tail"
    holders = {(h, incarnation) for h, incarnations in index._holders.items() for incarnation in incarnations}
    assert holders == {(h, incarnation) for incarnation, held in index._held.items() for h in held}
    assert all(index._holders.values())


def test_incarnations_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_HOLDERS", 2)
    index = PrefixIndex()
    for incarnation in ("i1", "i2", "i1", "i3"):
        index.sent(_ticket("a", 1), incarnation, LARGE)
    assert _found(index, _ticket("b", 1)) == {"i1": 16, "i3": 16}


def test_prompts_that_begin_alike_go_to_one_worker_and_others_elsewhere() -> None:
    index, workers = PrefixIndex(), [make_worker("w1", "i1"), make_worker("w2", "i2")]
    index.sent(_ticket("before", 1, 2, 3, 4, 5, 6, 7, 8), "i2", LARGE)
    assert _place(index, _ticket("alike", 1, 2, 3, 4, 5, 6, 7, 8), workers) == "w2"
    assert _place(index, _ticket("other", 9, 8, 7), workers) == "w1"
    assert _place(PrefixIndex(), _ticket("alike", 1, 2, 3), workers) == "w1"


def test_by_load_alone_prefixes_do_not_count() -> None:
    index, workers = PrefixIndex(), [make_worker("w1", "i1"), make_worker("w2", "i2")]
    index.sent(_ticket("before", 1, 2, 3), "i2", LARGE)
    assert _place(index, _ticket("alike", 1, 2, 3), workers, Rules(routing=ROUTINGS["least_loaded"])) == "w1"


def test_what_this_round_has_sent_counts_in_it_until_load_outweighs_it() -> None:
    """Of 200 tokens 96 are found: two that share a worker cost no more than apart; a third is cheaper beside nobody."""
    tickets = [_ticket(f"r{i}", 1, 2, 3, 4, 5, 6) for i in range(3)]
    rules, workers = PREFIX, [make_worker("w1", "i1", num_blocks=256), make_worker("w2", "i2", num_blocks=256)]
    placed = plan(Order([Fifo(tickets)], rules), workers, rules)
    assert [placement.worker.worker_id for placement in placed] == ["w1", "w2", "w1"]
    warm = [_ticket(f"r{i}", *range(12)) for i in range(3)]  # of 200 tokens 192
    placed = plan(Order([Fifo(warm)], rules), workers, rules)
    assert [placement.worker.worker_id for placement in placed] == ["w1", "w1", "w1"]
