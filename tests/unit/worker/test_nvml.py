"""Case B42b: NVIDIA's own Python library against a stub of the driver's: what fails, or isn't there, is absent and not 0."""

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from services.worker.nvml import THERMAL, Gpu
from services.worker.telemetry import Sensors, Telemetry

NOTHING = (None, None), None, None, None, None


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The stub, compiled."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("nvml_stub.cpp")], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def driver(stub: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The stub, where pynvml finds it."""
    monkeypatch.setattr(pynvml, "nvmlLib", stub)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    stub.fail_with(0)
    return stub


def _readings(gpu: Gpu) -> tuple[object, ...]:
    return gpu.utilization(), gpu.temperature_celsius(), gpu.power_watts(), gpu.sm_clock_mhz(), gpu.memory_clock_mhz()


def _facts(gpu: Gpu) -> tuple[object, ...]:
    return gpu.slowdown_celsius, gpu.num_nvlinks, gpu.mig_enabled, gpu.memory_bytes_per_second


def _links(gpu: Gpu) -> tuple[object, ...]:
    return gpu.throttle_reasons(), gpu.pcie_link(), gpu.pcie_replays()


def test_a_gpu_tells_what_it_has(driver: ctypes.CDLL) -> None:
    gpu = Gpu("GPU-1")
    assert _readings(gpu) == ((97, 55), 61, 412.5, 1980, 3201)
    assert _facts(gpu) == (87.0, 3, True, 2 * 2619e6 * 640)
    assert _links(gpu) == (0x24, (5, 16), 7)
    assert gpu.throttle_reasons() & THERMAL
    assert gpu.is_part is False


def test_a_part_of_a_gpu_is_found_by_its_own_name_and_has_the_boards_sensors(driver: ctypes.CDLL) -> None:
    """torch tells its UUID as it does a whole GPU's. What the part does is not what the whole does."""
    gpu = Gpu("GPU-2")
    assert _readings(gpu) == ((None, None), 61, 412.5, 1980, 3201)
    assert _facts(gpu)[:2] == (87.0, 3)
    assert gpu.is_part is True


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST, 999])
def test_what_it_does_not_tell_is_absent_until_it_does(driver: ctypes.CDLL, code: int) -> None:
    gpu = Gpu("GPU-1")
    driver.fail_with(code)
    assert _readings(gpu) == NOTHING
    assert _links(gpu) == (None, (None, None), None)
    assert _facts(Gpu("GPU-1")) == (None, None, None, None)
    driver.fail_with(0)
    assert gpu.temperature_celsius() == 61


def test_a_gpu_that_the_driver_does_not_find_tells_nothing(driver: ctypes.CDLL) -> None:
    assert _readings(Gpu("MIG-1")) == _readings(Gpu("")) == NOTHING
    assert (_facts(Gpu("MIG-1")), Gpu("MIG-1").is_part) == ((None, None, None, None), None)


def test_without_the_drivers_library_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    assert _readings(Gpu("GPU-1")) == NOTHING


def test_memory_is_what_cuda_says_whatever_the_driver_tells(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of a GPU NVML may report the whole."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="x", name="A100"))
    now = [0.0]
    sensors = Sensors("cuda:0", clock=lambda: now[0])
    assert sensors.read() == Telemetry(7, 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1", name="A100"))
    told = Sensors("cuda:0", clock=lambda: now[0]).read()
    assert (told.memory_used_bytes, told.temperature_celsius, told.power_watts, told.sm_clock_mhz) == (7, 61, 412.5, 1980)
    assert (told.slowdown_celsius, told.throttle_reasons, told.pcie_lanes, told.pcie_generation) == (87.0, 0x24, 16, 5)
    assert (told.pcie_replays, told.num_nvlinks, told.mig_enabled) == (7, 3, True)
