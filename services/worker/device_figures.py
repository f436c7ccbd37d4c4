"""A device's readings as Prometheus asks for them: a GPU's under DCGM's names and labels, a CPU's under forebay_host_*.

What a device doesn't tell has no series: a zero would be a claim.
"""

import socket
from collections.abc import Callable, Iterator

from services.common.metrics import Figure, Rows
from services.worker.telemetry import Device, Sensors, Telemetry

MIB = 1 << 20
DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")

Read = Callable[[Telemetry], float | None]

_DCGM: tuple[tuple[str, str, Read], ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "Share of the time that the GPU computed (in %).", lambda t: t.utilization_percent),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "Share of the time that its memory was read or written (in %).", lambda t: t.memory_busy_percent),
    ("DCGM_FI_DEV_FB_USED", "Memory in use (in MiB).", lambda t: t.memory_used_bytes / MIB),
    ("DCGM_FI_DEV_FB_FREE", "Memory free (in MiB).", lambda t: (t.memory_total_bytes - t.memory_used_bytes) / MIB),
    ("DCGM_FI_DEV_GPU_TEMP", "Temperature (in C).", lambda t: t.temperature_celsius),
    ("DCGM_FI_DEV_MEMORY_TEMP", "Temperature of the memory (in C).", lambda t: t.memory_temperature_celsius),
    ("DCGM_FI_DEV_POWER_USAGE", "Power drawn (in W).", lambda t: t.power_watts),
    ("DCGM_FI_DEV_SM_CLOCK", "Clock of the multiprocessors (in MHz).", lambda t: t.sm_clock_mhz),
    ("DCGM_FI_DEV_MEM_CLOCK", "Clock of the memory (in MHz).", lambda t: t.memory_clock_mhz),
    ("DCGM_FI_DEV_SLOWDOWN_TEMP", "Temperature from which it slows itself down (in C).", lambda t: t.slowdown_celsius),
    ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "Why its clocks are held down, as NVML's bits.", lambda t: t.throttle_reasons),
    ("DCGM_FI_DEV_PCIE_LINK_GEN", "Generation of the PCIe link as it is now.", lambda t: t.pcie_generation),
    ("DCGM_FI_DEV_PCIE_LINK_WIDTH", "Lanes of the PCIe link as it is now.", lambda t: t.pcie_lanes),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe packets that were sent again.", lambda t: t.pcie_replays),
    ("DCGM_FI_DEV_MIG_MODE", "1 where the GPU is divided.", lambda t: t.mig_enabled),
    ("forebay_device_nvlinks", "NVLinks that are up.", lambda t: t.num_nvlinks),
)
_HOST: tuple[tuple[str, str, Read], ...] = (
    ("forebay_host_memory_used_bytes", "Memory of the host that isn't available.", lambda t: t.memory_used_bytes),
    ("forebay_host_memory_total_bytes", "Memory of the host.", lambda t: t.memory_total_bytes),
    ("forebay_host_temperature_celsius", "The processor's hottest sensor.", lambda t: t.temperature_celsius),
    ("forebay_host_power_watts", "Power that the processor draws.", lambda t: t.power_watts),
)


def figures(sensors: Sensors) -> Iterator[Figure]:
    """One for each name."""
    device = sensors.device
    table, labels, values = (_HOST, (), ()) if device is None else (_DCGM, DCGM_LABELS, _labels(device))
    for name, text, read in table:
        yield Figure(name, text, _rows(sensors, read, values), labels)


def _labels(device: Device) -> tuple[str, ...]:
    return str(device.index), device.uuid, f"nvidia{device.index}", device.name, socket.gethostname()


def _rows(sensors: Sensors, read: Read, labels: tuple[str, ...]) -> Callable[[], Rows]:
    def rows() -> Rows:
        value = read(sensors.read())
        return [] if value is None else [(labels, value)]

    return rows
