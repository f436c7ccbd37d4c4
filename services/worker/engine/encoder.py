"""The encoder's engine: token ids in, one vector per input out, in steps as the generating engine's, so that one thread can run both.

There is no cache: what a step computes is said at its end, and nothing is kept.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.encode_queue import EncodeQueue, EncodeRequest, Pick, check
from services.worker.engine.encoder_config import EncoderConfig
from services.worker.engine.encoder_file import load_encoder
from services.worker.engine.request import FinishReason

__all__ = ["EncodeOutput", "EncodeRequest", "Encoder", "EncoderStats"]


_FORGET = 0.95
"""What a slow step still weighs one step later."""


class Model(Protocol):
    """What computes: Bert, or a stand-in of it in tests."""

    config: EncoderConfig

    def __call__(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """[num_inputs, hidden], fp32, on the CPU."""


@dataclass
class EncodeOutput:
    """Vectors of some of a request's inputs, in the order of `indexes`. The last one of a request has a finish reason: STOP or ERROR."""

    request_id: str
    indexes: list[int] = field(default_factory=list)
    vectors: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [len(indexes), dimensions], fp32
    num_tokens: int = 0  # of these inputs
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for it: its last vectors complete a request."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class EncoderStats:
    """Gauges of now, and counters since the start. There is no cache, so there are no blocks."""

    num_running: int  # requests
    num_waiting: int
    num_computed_tokens: int
    num_inputs: int
    num_steps: int
    num_blocks: ClassVar[int] = 0
    num_used_blocks: ClassVar[int] = 0
    num_cached_blocks: ClassVar[int] = 0


class Encoder:
    """A model and the requests on it. A step takes inputs of `max_step_tokens` together, or a single longer one."""

    def __init__(
        self, model: Model, *, max_step_tokens: int = 256, model_version: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock`, in seconds, times the steps."""
        self.config = model.config
        self.model_version = model_version
        self.max_step_tokens = max_step_tokens
        self.is_delayed = False  # its weights stay where they are
        self._num_computed_tokens = 0
        self._model = model
        self._queue = EncodeQueue()
        self._num_inputs = 0
        self._num_steps = 0
        self._clock = clock
        self._seconds_per_token = 0.0  # of slow steps

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        max_step_tokens: int = 256,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Encoder":
        """Loads a sentence-transformers folder. progress(bytes done, bytes in all). ModelFileError for a bad one."""
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        model, version = load_encoder(Path(path), device=device, progress=progress)
        return cls(model, max_step_tokens=max_step_tokens, model_version=version)

    @property
    def has_work(self) -> bool:
        """True while a step would do or say something."""
        return len(self._queue) > 0

    @property
    def most_urgent_class(self) -> int:
        """Of the live requests; batch where there is none."""
        return self._queue.most_urgent_class

    @property
    def num_tokens(self) -> tuple[int, int]:
        """(computed, generated) since the start; it generates none."""
        return self._num_computed_tokens, 0

    def add(self, request: EncodeRequest) -> None:
        """Queues a request. InvalidRequest for a value that can't be computed with, RequestTooLarge for an input that is too long."""
        config = self.config
        check(request, vocab_size=config.vocab_size, max_input_len=config.max_input_len, hidden_size=config.hidden_size)
        self._queue.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; nothing more is said of it. Idempotent."""
        self._queue.abort(request_id)

    def step(self, now: float) -> list[EncodeOutput]:  # noqa: ARG002  # as the other engine's
        """Computes the next inputs. One output per request that has news."""
        picks = self._queue.choose(self.max_step_tokens)
        inputs = [pick.request.inputs[index] for pick in picks for index in pick.indexes]
        if not inputs:
            return []
        started, num_tokens = self._clock(), sum(map(len, inputs))
        vectors = self._model(inputs)
        self._seconds_per_token = max(_FORGET * self._seconds_per_token, (self._clock() - started) / num_tokens)
        self._num_steps += 1
        self._num_inputs += len(inputs)
        self._num_computed_tokens += num_tokens
        outputs = list(_outputs(picks, vectors))
        for output in outputs:
            if output.error is not None:
                self.abort(output.request_id)
        return outputs

    def full_step_seconds(self) -> float:
        """Foretold, of the longest step that may come, from those that took long for their tokens; 0 before the first."""
        return self._seconds_per_token * max(self.max_step_tokens, self.config.max_input_len)

    def progress(self) -> list[tuple[str, int, int]]:
        """(request id, tokens computed, 0 blocks) of every live request."""
        return [(request_id, num_tokens, 0) for request_id, num_tokens in self._queue.progress()]

    def stats(self) -> EncoderStats:
        """Numbers for heartbeats and metrics."""
        return EncoderStats(
            num_running=len(self._queue) - self._queue.num_waiting,
            num_waiting=self._queue.num_waiting,
            num_computed_tokens=self._num_computed_tokens,
            num_inputs=self._num_inputs,
            num_steps=self._num_steps,
        )

    def check_integrity(self) -> None:
        """Asserts the invariant between steps: whatever is queued has inputs left."""
        self._queue.check_integrity()


def _outputs(picks: Sequence[Pick], vectors: Tensor) -> Iterator[EncodeOutput]:
    for pick, rows in zip(picks, torch.split(vectors, [len(pick.indexes) for pick in picks]), strict=True):
        output = EncodeOutput(pick.request.request_id, pick.indexes, _cut(rows, pick.request.dimensions))
        output.num_tokens = sum(len(pick.request.inputs[index]) for index in pick.indexes)
        if not bool(torch.isfinite(rows).all()):
            output.error = f"the vector of inputs[{_first_bad(pick, rows)}] isn't finite"
        if output.error is not None or pick.is_last:
            output.finish_reason = FinishReason.STOP if output.error is None else FinishReason.ERROR
        yield output


def _cut(rows: Tensor, dimensions: int | None) -> Tensor:
    """The first dimensions, of length 1 again: what is left of a normalised vector isn't."""
    return rows if dimensions is None or dimensions == rows.shape[1] else F.normalize(rows[:, :dimensions], dim=-1)


def _first_bad(pick: Pick, rows: Tensor) -> int:
    return pick.indexes[int((~torch.isfinite(rows).all(1)).int().argmax())]
