"""What the device says of itself: memory, and its sensors where it has them. A field that a device doesn't tell is None."""

import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from services.common import log
from services.worker.nvml import Gpu

_logger = log.get(__name__)

CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
"""Names under which Linux reports processors, best first."""
SLOPE_READINGS = 8
"""Readings over which a temperature's slope is told: sensors are coarse."""


@dataclass(frozen=True)
class Telemetry:
    """One reading. Bytes, degrees Celsius."""

    memory_used_bytes: int
    memory_total_bytes: int
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None  # of the time: it computed
    memory_busy_percent: float | None = None  # of the time: its memory was read or written
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_bytes_per_second: float | None = None  # at most
    slowdown_celsius: float | None = None  # from here on it slows itself down
    throttle_reasons: int | None = None  # NVML's bits; see nvml.THERMAL
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    pcie_replays: int | None = None
    num_nvlinks: int | None = None  # that are up
    mig_enabled: bool | None = None


@dataclass(frozen=True)
class Device:
    """Which GPU it is. `uuid` as NVIDIA's tools write it; empty where the driver doesn't tell."""

    index: int
    uuid: str
    name: str


class Sensors:
    """The readings of one device ("cpu", "cuda:0"), taken at most once per `max_age_seconds`. `device` is None for a CPU."""

    def __init__(self, device: str, *, max_age_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.device = None if device == "cpu" else _gpu(device)
        gpu = None if self.device is None else Gpu(self.device.uuid)
        self._read_now = _read_cpu if gpu is None else lambda: _read_cuda(device, gpu)
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._read_at = self._clock()
        self._reading = Telemetry(0, 0)
        self._temperatures: deque[tuple[float, float]] = deque(maxlen=SLOPE_READINGS)
        self._failed = False
        self._take_reading()

    def read(self) -> Telemetry:
        """The newest reading."""
        now = self._clock()
        if now - self._read_at >= self._max_age_seconds:
            self._read_at = now
            self._take_reading()
        return self._reading

    @property
    def celsius_per_second(self) -> float | None:
        """How fast it has warmed over the last readings; None while there are too few."""
        if len(self._temperatures) < 2:
            return None
        (began, first), (ended, last) = self._temperatures[0], self._temperatures[-1]
        return (last - first) / (ended - began)

    def _take_reading(self) -> None:
        """A driver that fails costs the figures and no heartbeat: memory stays as it was last, the rest is absent."""
        try:
            self._reading, self._failed = self._read_now(), False
        except RuntimeError as error:
            if not self._failed:
                _logger.warning("no_telemetry", why=str(error)[:200])
            self._failed = True
            self._reading = Telemetry(self._reading.memory_used_bytes, self._reading.memory_total_bytes)
        if self._reading.temperature_celsius is not None:
            self._temperatures.append((self._read_at, self._reading.temperature_celsius))


def device_name(device: str) -> str:
    """The device's name, for people."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _gpu(device: str) -> Device:
    index = torch.device(device).index or 0
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return Device(index, "" if uuid is None else f"GPU-{uuid}", properties.name)


def _read_cpu() -> Telemetry:
    memory = psutil.virtual_memory()
    return Telemetry(memory.total - memory.available, memory.total, temperature_celsius=_cpu_temperature())


def _cpu_temperature() -> float | None:
    """The hottest processor sensor. None in most containers and virtual machines, and off Linux."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    for name in CPU_SENSORS:
        if readings := [reading.current for reading in sensors.get(name, ()) if reading.current]:
            return float(max(readings))
    return None


def _read_cuda(device: str, gpu: Gpu) -> Telemetry:
    # Memory by CUDA: of a part of a GPU, too, it tells what that part has.
    free, total = torch.cuda.mem_get_info(device)
    utilization, memory_busy = gpu.utilization()
    generation, lanes = gpu.pcie_link()
    return Telemetry(
        total - free,
        total,
        temperature_celsius=gpu.temperature_celsius(),
        power_watts=gpu.power_watts(),
        utilization_percent=utilization,
        memory_busy_percent=memory_busy,
        sm_clock_mhz=gpu.sm_clock_mhz(),
        memory_clock_mhz=gpu.memory_clock_mhz(),
        memory_bytes_per_second=gpu.memory_bytes_per_second,
        slowdown_celsius=gpu.slowdown_celsius,
        throttle_reasons=gpu.throttle_reasons(),
        pcie_generation=generation,
        pcie_lanes=lanes,
        pcie_replays=gpu.pcie_replays(),
        num_nvlinks=gpu.num_nvlinks,
        mig_enabled=gpu.mig_enabled,
    )
