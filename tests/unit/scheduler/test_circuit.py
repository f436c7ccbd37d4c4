"""The circuit lets one probe through at a time while it is open."""

from services.scheduler.circuit import Circuit


def test_open_after_a_failure_until_a_probe_succeeds() -> None:
    circuit = Circuit(open_seconds=1.0)
    assert circuit.admits(0.0)
    circuit.failed(0.0)
    assert circuit.is_open
    assert not circuit.admits(0.9)
    assert circuit.admits(1.0), "the probe"
    assert not circuit.admits(1.1), "one at a time"
    circuit.failed(1.2)
    assert not circuit.admits(2.1)
    assert circuit.admits(2.2)
    circuit.succeeded()
    assert circuit.admits(2.2)
    assert not circuit.is_open
