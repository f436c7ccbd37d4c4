"""Readings of the device; what it hasn't got is absent."""

from types import SimpleNamespace

import psutil
import pytest

from services.worker.telemetry import SLOPE_READINGS, Sensors, device_name


def test_memory_is_there() -> None:
    reading = Sensors("cpu").read()
    assert 0 < reading.memory_used_bytes < reading.memory_total_bytes
    assert device_name("cpu").startswith("CPU ")


@pytest.mark.parametrize(
    ("sensors", "temperature"),
    [
        ({}, None),
        ({"nvme": [SimpleNamespace(current=60.0)]}, None),
        ({"acpitz": [SimpleNamespace(current=30.0)], "coretemp": [SimpleNamespace(current=51.0), SimpleNamespace(current=55.0)]}, 55.0),
        ({"coretemp": [SimpleNamespace(current=0.0)], "cpu_thermal": [SimpleNamespace(current=48.5)]}, 48.5),
    ],
)
def test_the_processors_hottest_sensor_counts(
    monkeypatch: pytest.MonkeyPatch, sensors: dict[str, list[SimpleNamespace]], temperature: float | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors)
    assert Sensors("cpu").read().temperature_celsius == temperature


def test_a_system_without_sensors_has_no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    assert Sensors("cpu").read().temperature_celsius is None


def test_sensors_are_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    asked = []
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: asked.append(1) or {}, raising=False)
    sensors = Sensors("cpu", clock=lambda: now[0])
    sensors.read()
    assert len(asked) == 1
    now[0] = 1.0
    sensors.read()
    assert len(asked) == 2


def test_how_fast_it_warms_is_told_over_the_last_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now, celsius = [0.0], [50.0]
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"coretemp": [SimpleNamespace(current=celsius[0])]})
    sensors = Sensors("cpu", clock=lambda: now[0])
    assert sensors.celsius_per_second is None, "one reading has no slope"
    for _ in range(SLOPE_READINGS):
        now[0] += 1.0
        celsius[0] += 0.5
        sensors.read()
    assert sensors.celsius_per_second == pytest.approx(0.5)
    for _ in range(SLOPE_READINGS):
        now[0] += 1.0
        sensors.read()
    assert sensors.celsius_per_second == 0
