"""What copying a block and computing a token cost, as measured, and which of them is the cheaper way to a cached block. No clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.9  # weight of the past at each new measurement
LONG_SPAN = 16  # tokens: a span as long recomputes a prompt; a shorter one decodes or verifies


@dataclass
class Rate:
    """Seconds per unit over the latest measurements, the large ones weighing more."""

    units: float = 0.0
    seconds: float = 0.0

    def record(self, units: int, seconds: float) -> None:
        """`units` took `seconds` together."""
        self.units = DECAY * self.units + units
        self.seconds = DECAY * self.seconds + seconds

    def doubt(self) -> None:
        """Takes it for less: what isn't done for its cost isn't measured again, and one stall would rule it out for ever."""
        self.seconds *= DECAY

    @property
    def per_unit(self) -> float | None:
        """Seconds; None before the first measurement."""
        return self.seconds / self.units if self.units else None


@dataclass
class Costs:
    """`copy` counts blocks in either direction, `prefill` tokens."""

    copy: Rate = field(default_factory=Rate)
    prefill: Rate = field(default_factory=Rate)

    def record_step(self, span_lengths: Sequence[int], seconds: float) -> None:
        """Learns from steps that are prompts for the most part: alone, a decoded token costs many times as much."""
        num_tokens = sum(span_lengths)
        if 2 * sum(length for length in span_lengths if length >= LONG_SPAN) > num_tokens:
            self.prefill.record(num_tokens, seconds)

    def copying_pays(self, block_size: int) -> bool:
        """Whether a block is back from the host as soon as its tokens would be computed anew; True until both are measured.

        Both grow with the number of blocks, so that it doesn't matter. Copies to the host go on being measured where it is False.
        """
        if self.copy.per_unit is None or self.prefill.per_unit is None:
            return True
        return self.copy.per_unit <= self.prefill.per_unit * block_size

    def swapping_pays(self, block_size: int) -> bool:
        """Whether a block goes to the host and comes back as soon as its tokens would be computed anew; True until both are measured."""
        if self.copy.per_unit is None or self.prefill.per_unit is None:
            return True
        return 2 * self.copy.per_unit <= self.prefill.per_unit * block_size
