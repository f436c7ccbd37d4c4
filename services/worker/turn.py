"""What the engines' thread tells the event loop: steps, and turns of them; and the last second's steps as rates."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.common.errors import StatusError
from services.worker.sharing.device import Output, Progress, Stats


@dataclass(frozen=True)
class Step:
    """One step of one engine. Times by the loop's clock."""

    model: str
    started: float
    ended: float
    num_tokens: int  # computed, the prompts' included
    num_generated_tokens: int

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True)
class Turn:
    """What the event loop takes from the thread at once: of some steps, perhaps one or none."""

    stats: Mapping[str, Stats]  # by model
    progress: Progress
    outputs: Sequence[Output] = field(default_factory=list)
    refusals: list[tuple[str, StatusError]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class StepWindow:
    """The last second's steps: busy share, mean duration, tokens per second."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._steps: deque[Step] = deque()

    def record(self, step: Step) -> None:
        """Adds a step; steps come in order."""
        self._steps.append(step)
        self._forget(step.ended)

    def utilization(self, now: float, running_since: float | None = None) -> float:
        """Share of the window in which the engine was stepping, 0 .. 1. `running_since`: start of the step that is not over yet."""
        self._forget(now)
        start = now - self._seconds
        busy = sum(step.ended - max(step.started, start) for step in self._steps)
        if running_since is not None:
            busy += now - max(running_since, start)
        return min(1.0, max(0.0, busy / self._seconds))

    def step_seconds(self, now: float) -> float:
        """Mean duration of the window's steps; 0 when there was none."""
        self._forget(now)
        return sum(step.ended - step.started for step in self._steps) / max(1, len(self._steps))

    def tokens_per_second(self, now: float) -> float:
        """Tokens generated in the window, per second."""
        self._forget(now)
        return sum(step.num_generated_tokens for step in self._steps) / self._seconds

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0].ended < now - self._seconds:
            self._steps.popleft()


def joined(turns: Sequence[Turn]) -> Turn:
    """One after another, as they are after the last."""
    return replace(
        turns[-1],
        outputs=[output for turn in turns for output in turn.outputs],
        refusals=[refusal for turn in turns for refusal in turn.refusals],
        steps=[step for turn in turns for step in turn.steps],
    )
