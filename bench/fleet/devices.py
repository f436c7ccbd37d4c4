"""Devices and models of the simulated fleet: what a step takes on them by their arithmetic, and how they warm up.

Figures are those of data sheets times what engines reach of them; only their ratios matter here.
"""

import math
from dataclasses import dataclass

GB = 1e9
SLOWED = 0.7
"""Speed of a device that throttles."""
RELEASE_CELSIUS = 3.0
"""So far below its limit it is fast again."""


@dataclass(frozen=True)
class Device:
    """`flops` and `bytes_per_second` as engines reach them. rise_celsius: above the air around it when it is always busy."""

    name: str
    flops: float
    bytes_per_second: float
    memory_bytes: float
    rise_celsius: float
    slowdown_celsius: float = 83.0
    warming_seconds: float = 25.0


@dataclass(frozen=True)
class Model:
    """`attention_flops`: per token and token of its context."""

    name: str
    num_parameters: float
    weight_bytes: float
    kv_bytes_per_token: float
    attention_flops: float
    max_output: bool = True


H100 = Device("H100", 600e12, 2.7e12, 80 * GB, rise_celsius=48.0)
A100 = Device("A100", 190e12, 1.6e12, 80 * GB, rise_celsius=44.0)
SMALL = Model("7b", 7e9, 14 * GB, 131_072, 4 * 32 * 4096)
LARGE = Model("32b", 32e9, 33 * GB, 262_144, 4 * 64 * 5120)
EMBEDDING = Model("embed", 0.6e9, 1.2 * GB, 57_344, 4 * 28 * 1024)
RESERVED_BYTES = 8 * GB
OVERHEAD_SECONDS = 0.0015


@dataclass(frozen=True)
class StepLaw:
    """What a step really takes. The square part, which no fitted line knows, makes those lines as wrong as they are in practice."""

    fixed: float
    token: float
    row: float
    key: float
    pair: float

    def seconds(self, num_tokens: int, num_rows: int, num_keys: float, num_pairs: float) -> float:
        """`num_pairs`: of each token computed with the context that it looks at."""
        return self.fixed + self.token * num_tokens + self.row * num_rows + self.key * num_keys + self.pair * num_pairs


def law(device: Device, model: Model) -> StepLaw:
    """Weights read once, arithmetic per token, cache read per key."""
    return StepLaw(
        fixed=OVERHEAD_SECONDS + model.weight_bytes / device.bytes_per_second,
        token=2 * model.num_parameters / device.flops,
        row=20e-6,
        key=model.kv_bytes_per_token / device.bytes_per_second,
        pair=model.attention_flops / device.flops,
    )


def cache_tokens(device: Device, model: Model) -> int:
    """That fit beside the weights."""
    return int((device.memory_bytes - model.weight_bytes - RESERVED_BYTES) / model.kv_bytes_per_token)


@dataclass
class Thermals:
    """A heat capacity behind a thermal resistance: temperature follows power with one time constant."""

    device: Device
    air_celsius: float
    celsius: float = 0.0
    celsius_per_second: float = 0.0
    is_slowed: bool = False
    slowed_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.celsius = self.celsius or self.air_celsius + self.device.rise_celsius / 4

    def pass_time(self, seconds: float, busy: float) -> None:
        """So long it was busy for that share of the time; an idle device draws a quarter of its power."""
        if seconds <= 0:
            return
        end = self.air_celsius + self.device.rise_celsius * (0.25 + 0.75 * busy)
        before = self.celsius
        self.celsius = end + (self.celsius - end) * math.exp(-seconds / self.device.warming_seconds)
        self.celsius_per_second = (self.celsius - before) / seconds
        self.slowed_seconds += seconds * self.is_slowed
        if self.celsius >= self.device.slowdown_celsius:
            self.is_slowed = True
        elif self.celsius < self.device.slowdown_celsius - RELEASE_CELSIUS:
            self.is_slowed = False

    @property
    def speed(self) -> float:
        """Of its full speed."""
        return SLOWED if self.is_slowed else 1.0
