"""The gate closes at the first trouble and opens when it has been quiet for a while; a temperature at its limit doesn't make it flap."""

from services.scheduler.policy.health import QUIET_SECONDS, Gate


def test_trouble_closes_it_at_once_and_quiet_opens_it() -> None:
    gate = Gate()
    gate.note("w1", 10.0, healthy=True, celsius=None)
    assert not gate.is_closed("w1", 10.0)
    gate.note("w1", 11.0, healthy=False, celsius=None)
    gate.note("w1", 12.0, healthy=True, celsius=None)
    assert gate.is_closed("w1", 11.0 + QUIET_SECONDS - 0.1)
    assert not gate.is_closed("w1", 11.0 + QUIET_SECONDS)
    assert not gate.is_closed("w2", 11.0), "of another nothing is known"


def test_a_device_at_its_limit_is_out_until_it_has_cooled() -> None:
    gate = Gate()
    states = []
    for now, celsius in enumerate((82.0, 83.0, 82.0, 79.5, 78.9, 82.0)):
        gate.note("w1", float(now), healthy=True, celsius=celsius, slowdown_celsius=83.0)
        states.append(gate.is_closed("w1", float(now)))
    assert states == [False, True, True, True, False, False]


def test_workers_that_have_gone_are_forgotten() -> None:
    gate = Gate()
    for worker_id in ("w1", "w2"):
        gate.note(worker_id, 0.0, healthy=False, celsius=99.0)
    gate.keep({"w2": None})
    assert not gate.is_closed("w1", 0.0)
    assert gate.is_closed("w2", 0.0)
