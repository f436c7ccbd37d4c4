"""What NVIDIA's driver says of one GPU, by its own library. Anything may be missing: the library, the right to ask, the sensor."""

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")


class Gpu:
    """One GPU by its UUID. Nothing is known of one that the driver doesn't find; each reading is None where it isn't told."""

    def __init__(self, uuid: str) -> None:
        self._handle = _ask(lambda: _find(uuid))

    def utilization(self) -> tuple[float | None, float | None]:
        """Percent of the time that it computed, and that its memory was read or written."""
        rates = self._told(pynvml.nvmlDeviceGetUtilizationRates)
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

    def _told(self, read: Callable[[Any], T]) -> T | None:
        return None if self._handle is None else _ask(lambda: read(self._handle))


def _find(uuid: str) -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


def _ask(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except pynvml.NVMLError:
        return None
