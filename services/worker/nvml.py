"""What NVIDIA's driver says of one GPU, by its own library. Anything may be missing: the library, the right to ask, the sensor."""

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")

THERMAL = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
"""Of the bits of `throttle_reasons`, those that mean heat."""


class Gpu:
    """One GPU, or a part of one (MIG), by its UUID. Nothing is known of one that the driver doesn't find; each reading is None where it
    isn't told.

    A part has no sensors of its own: temperature, power, clocks and links are the board's. PCIe throughput isn't read, as the driver
    measures it for 20 ms while the caller waits.
    """

    def __init__(self, uuid: str) -> None:
        self._part = _ask(lambda: _find(uuid))
        parent = self._of(self._part, _parent)
        self.is_part = None if self._part is None else parent is not None
        self._handle = self._part if parent is None else parent
        self.num_nvlinks = self._told(_num_nvlinks)
        self.slowdown_celsius = self._told(
            lambda handle: float(pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
        )
        self.memory_bytes_per_second = self._told(_memory_bytes_per_second)
        self.mig_enabled = self._told(lambda handle: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]))

    def utilization(self) -> tuple[float | None, float | None]:
        """Percent of the time that it computed, and that its memory was read or written."""
        rates = self._of(self._part, pynvml.nvmlDeviceGetUtilizationRates)
        return (None, None) if rates is None else (float(rates.gpu), float(rates.memory))

    def temperature_celsius(self) -> float | None:
        """Of the chip."""
        return self._told(lambda handle: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))

    def power_watts(self) -> float | None:
        """Drawn by the whole board."""
        return self._told(lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)

    def sm_clock_mhz(self) -> float | None:
        """Of the multiprocessors."""
        return self._told(lambda handle: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)))

    def memory_clock_mhz(self) -> float | None:
        """Of the memory."""
        return self._told(lambda handle: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)))

    def throttle_reasons(self) -> int | None:
        """Why its clocks are held down, as NVML's bits; see THERMAL."""
        return self._told(lambda handle: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))

    def pcie_link(self) -> tuple[int | None, int | None]:
        """Generation and lanes of its PCIe link as they are now; fewer than the slot's tell of a bad contact, or of idling."""
        return self._told(pynvml.nvmlDeviceGetCurrPcieLinkGeneration), self._told(pynvml.nvmlDeviceGetCurrPcieLinkWidth)

    def pcie_replays(self) -> int | None:
        """Packets that were sent again since the driver was loaded."""
        return self._told(pynvml.nvmlDeviceGetPcieReplayCounter)

    def _told(self, read: Callable[[Any], T]) -> T | None:
        return self._of(self._handle, read)

    def _of(self, handle: Any, read: Callable[[Any], T]) -> T | None:
        return None if handle is None else _ask(lambda: read(handle))


def _find(uuid: str) -> Any:
    """torch tells the UUID of a part as it does a whole GPU's."""
    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-", 1))


def _parent(handle: Any) -> Any:
    """The whole GPU of a part; None for a whole one."""
    return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if pynvml.nvmlDeviceIsMigDeviceHandle(handle).value else None


def _num_nvlinks(handle: Any) -> int:
    """Links that are up. Raises where there is no first one."""
    states = [pynvml.nvmlDeviceGetNvLinkState(handle, 0)]
    for link in range(1, pynvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[misc]
        if state is None:
            break
        states.append(state)
    return sum(states)


def _memory_bytes_per_second(handle: Any) -> float:
    """Two transfers a clock over the whole bus."""
    clock_hz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1e6
    return float(2 * clock_hz * pynvml.nvmlDeviceGetMemoryBusWidth(handle) / 8)


def _ask(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except pynvml.NVMLError:
        return None
