"""A GPU's readings bear DCGM's names and labels, a CPU's the host's; what a device doesn't tell has no series."""

import socket
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import Metric

from services.worker.device_figures import figures
from services.worker.telemetry import Device, Sensors, Telemetry

GIB = 1 << 30
GPU = Device(1, "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "NVIDIA H200")


def sensors(reading: Telemetry, device: Device | None) -> Sensors:
    return cast("Any", SimpleNamespace(device=device, read=lambda: reading))


def families(reading: Telemetry, device: Device | None) -> dict[str, Metric]:
    return {family.name: family for figure in figures(sensors(reading, device)) for family in figure.collect()}


def values(found: dict[str, Metric]) -> dict[str, float]:
    return {sample.name: sample.value for family in found.values() for sample in family.samples}


def test_a_gpu_that_tells_all_has_all_of_dcgms_gauges() -> None:
    reading = Telemetry(
        3 * GIB,
        4 * GIB,
        temperature_celsius=61.0,
        memory_temperature_celsius=70.0,
        power_watts=412.5,
        utilization_percent=97.0,
        memory_busy_percent=55.0,
        sm_clock_mhz=1980.0,
        memory_clock_mhz=3201.0,
    )
    found = families(reading, GPU)
    assert values(found) == {
        "DCGM_FI_DEV_GPU_UTIL": 97,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 55,
        "DCGM_FI_DEV_FB_USED": 3072,
        "DCGM_FI_DEV_FB_FREE": 1024,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_MEMORY_TEMP": 70,
        "DCGM_FI_DEV_POWER_USAGE": 412.5,
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 3201,
    }
    assert {family.type for family in found.values()} == {"gauge"}
    (sample,) = found["DCGM_FI_DEV_GPU_UTIL"].samples
    assert sample.labels == {"gpu": "1", "UUID": GPU.uuid, "device": "nvidia1", "modelName": GPU.name, "Hostname": socket.gethostname()}


def test_b42b_what_a_gpu_does_not_tell_is_absent_and_not_0() -> None:
    assert values(families(Telemetry(GIB, 2 * GIB), GPU)) == {"DCGM_FI_DEV_FB_USED": 1024, "DCGM_FI_DEV_FB_FREE": 1024}


def test_a_cpu_has_the_hosts_memory_and_no_gpu() -> None:
    found = values(families(Telemetry(GIB, 2 * GIB), None))
    assert found == {"forebay_host_memory_used_bytes": GIB, "forebay_host_memory_total_bytes": 2 * GIB}
    warm = values(families(Telemetry(GIB, 2 * GIB, temperature_celsius=51.0), None))
    assert warm["forebay_host_temperature_celsius"] == 51
