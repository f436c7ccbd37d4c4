"""When a request that lost workers is a suspect, and whose word it waits for."""

from forebay.v1 import scheduler_pb2
from services.gateway.deaths import SAME_PLACE_TOKENS, Deaths


def lease(worker: str) -> scheduler_pb2.Lease:
    return scheduler_pb2.Lease(worker_id=worker, incarnation=f"{worker}-i")


def test_one_death_makes_a_suspect_that_waits_for_nobody() -> None:
    deaths = Deaths()
    assert not deaths.suspect
    deaths.lost(lease("w1"), 5, "")
    assert deaths.suspect
    assert not deaths.awaited


def test_two_deaths_about_the_same_place_are_waited_for() -> None:
    deaths = Deaths()
    deaths.lost(lease("w1"), 5, "")
    deaths.lost(lease("w2"), 5 + SAME_PLACE_TOKENS, "ENGINE_HANGS")
    assert [(dead.worker_id, dead.incarnation) for dead in deaths.awaited] == [("w1", "w1-i"), ("w2", "w2-i")]


def test_two_deaths_far_apart_are_chance() -> None:
    deaths = Deaths()
    deaths.lost(lease("w1"), 5, "")
    deaths.lost(lease("w2"), 6 + SAME_PLACE_TOKENS, "")
    assert not deaths.awaited
    deaths.lost(lease("w3"), 7 + SAME_PLACE_TOKENS, "")
    assert [dead.worker_id for dead in deaths.awaited] == ["w2", "w3"]


def test_a_worker_that_drains_did_not_die() -> None:
    deaths = Deaths()
    deaths.lost(lease("w1"), 5, "DRAINED")
    assert not deaths.suspect
