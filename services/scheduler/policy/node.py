"""What a worker says of itself beyond its room: how long its steps take, how warm it is. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SLOWDOWN_CELSIUS = 83.0
"""Where a device that doesn't tell slows itself down: as an H100 does."""
KNEE_CELSIUS, MARGIN_CELSIUS = 75.0, 8.0
"""A device counts as slower from here on, or from so much below its limit, if that is lower."""
MOST_SLOWED = 0.7
FORESIGHT_SECONDS = 10.0
"""So far ahead a temperature that rises is taken for what it will be: about the length of a request."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: fixed + token x tokens + row x rows of logits + key x lengths of contexts."""

    fixed: float
    token: float
    row: float
    key: float

    def seconds(self, num_tokens: float, num_rows: float, num_keys: float) -> float:
        """Of a step with this load."""
        return self.fixed + self.token * num_tokens + self.row * num_rows + self.key * num_keys


@dataclass(frozen=True, slots=True)
class NodeState:
    """By its last heartbeat. `step` None: it has seen too few steps. Temperatures None: no sensor.

    utilization: share of the last second that it was stepping, 0 .. 1. memory_free: share of its memory, 0 .. 1.
    suspended: it was in trouble lately; see health.py. absent: models whose weights aren't on the device -> seconds until they would be.
    """

    step: StepCost | None = None
    max_step_tokens: int = 512
    utilization: float = 0.0
    memory_free: float = 1.0
    num_queued: int = 0
    temperature_celsius: float | None = None
    celsius_per_second: float | None = None
    slowdown_celsius: float = SLOWDOWN_CELSIUS
    region: str = ""
    suspended: bool = False
    absent: Mapping[str, float] = field(default_factory=dict)


def prefill_rate(node: NodeState, num_sequences: int, num_keys: int) -> float:
    """Tokens of prompts per second beside so many sequences that decode, with contexts of so many tokens; 0 while it isn't known."""
    if node.step is None:
        return 0.0
    room = max(1, node.max_step_tokens - num_sequences)
    return room / node.step.seconds(num_sequences + room, num_sequences, num_keys)


def full_rate(node: NodeState) -> float:
    """Tokens per second of steps that are full of prompts: no load brings it more; 0 while it isn't known."""
    return 0.0 if node.step is None else node.max_step_tokens / node.step.seconds(node.max_step_tokens, 1, 0)


def thermal_factor(node: NodeState, foresight_seconds: float = FORESIGHT_SECONDS) -> float:
    """Share of its speed that a worker keeps at the temperature to which it is warming: SPEC 4's line, from 1 down to MOST_SLOWED."""
    if node.temperature_celsius is None:
        return 1.0
    expected = node.temperature_celsius + max(0.0, node.celsius_per_second or 0.0) * foresight_seconds
    knee = min(KNEE_CELSIUS, node.slowdown_celsius - MARGIN_CELSIUS)
    if expected < knee:
        return 1.0
    return max(MOST_SLOWED, 1 - (1 - MOST_SLOWED) * (expected - knee) / (node.slowdown_celsius - knee))
