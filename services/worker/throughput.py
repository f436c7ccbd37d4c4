"""The ceiling of continuous batching (SPEC 5), and what of it the last minute's requests came to. Pure: the time is an argument."""

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 60


def resident_sequences(*, num_blocks: int, block_size: int, mean_length: float, max_sequences: int) -> float:
    """Sequences of `mean_length` tokens, prompt and output, that run side by side: as many as cache and slots hold."""
    return min(max_sequences, num_blocks * block_size / mean_length)


def theta_max(resident: float, steps_per_second: float, mean_output: float) -> float:
    """Requests per second that so many resident sequences, each yielding a token a step, come to at most."""
    return resident * steps_per_second / mean_output


@dataclass
class _Second:
    """What one second saw."""

    at: int
    num_requests: int = 0
    num_tokens: int = 0  # prompt and output of those
    num_output_tokens: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0


class Throughput:
    """The last minute of one engine, a second at a time."""

    def __init__(self, *, num_blocks: int, block_size: int, max_sequences: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_sequences = max_sequences
        self._seconds: deque[_Second] = deque()

    def record_steps(self, now: float, num_steps: int, seconds: float) -> None:
        """So many steps have ended, which took so long together."""
        second = self._second(now)
        second.num_steps += num_steps
        second.step_seconds += seconds

    def record_end(self, now: float, *, n: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request of n choices has ended, with so many output tokens in all."""
        second = self._second(now)
        second.num_requests += n
        second.num_tokens += n * num_prompt_tokens + num_output_tokens
        second.num_output_tokens += num_output_tokens

    def theta_max(self, now: float) -> float | None:
        """Sequences per second that lengths, cache and step times of the last minute allow; None where it had none."""
        self._forget(now)
        num_requests = sum(second.num_requests for second in self._seconds)
        num_output = sum(second.num_output_tokens for second in self._seconds)
        step_seconds = sum(second.step_seconds for second in self._seconds)
        if not num_output or not step_seconds:
            return None
        resident = resident_sequences(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            mean_length=sum(second.num_tokens for second in self._seconds) / num_requests,
            max_sequences=self._max_sequences,
        )
        steps_per_second = sum(second.num_steps for second in self._seconds) / step_seconds
        return theta_max(resident, steps_per_second, num_output / num_requests)

    def share(self, now: float) -> float | None:
        """What the sequences that ended in the last minute were of that, over the time since the first of it."""
        ceiling = self.theta_max(now)
        if ceiling is None:
            return None
        num_requests = sum(second.num_requests for second in self._seconds)
        return num_requests / max(1.0, now - self._seconds[0].at) / ceiling

    def _second(self, now: float) -> _Second:
        if not self._seconds or self._seconds[-1].at != int(now):
            self._seconds.append(_Second(int(now)))
            self._forget(now)
        return self._seconds[-1]

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0].at < now - WINDOW_SECONDS:
            self._seconds.popleft()
