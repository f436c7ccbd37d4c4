"""Moves the models' weights in and out of device memory as residency decides: the bytes, and the thread that brings them.

On a CPU device memory is ordinary memory of a fixed size, and the copy stands for a bus: the same code moves the same bytes.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from torch import Tensor

from services.worker.engine.batch import Batch, SpanResult
from services.worker.engine.request import SequenceError
from services.worker.sharing.layout import allocate
from services.worker.sharing.orders import Kind, Outcome, obey
from services.worker.sharing.residency import Place, Residency


class Movable(Protocol):
    """A decoder whose weights can move, see NativeDecoder, or weights that do, see MovingWeights."""

    @property
    def weights(self) -> Tensor: ...
    def move(self, place: Tensor | None) -> None: ...
    def bring(self) -> None: ...


class Weights:
    """`decoders` by model; one that isn't among them has its weights elsewhere, and is always able. Called by the engines' thread alone."""

    def __init__(
        self,
        budget: int,
        decoders: Mapping[str, Movable],
        pinned: Collection[str] = (),
        device: str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`budget` is the bytes of device memory for weights. OSError: there is no such memory."""
        self.residency = Residency(budget)
        self._decoders = dict(decoders)
        self._clock = clock
        # Written once, or the first copies would pay for making pages.
        self._memory = allocate(1, budget, device)[0].fill_(0)
        self._coming: tuple[str, threading.Thread] | None = None
        self._seconds = 0.0  # of what came last
        self.on_failure: Callable[[str, str], None] = lambda _model, _reason: None
        """Called with a model, and the reason, whose weights are lost: it is to be given a FailedRunner."""
        # Pinned ones first: what they leave decides about the others.
        for model, decoder in sorted(decoders.items(), key=lambda item: item[0] not in pinned):
            self.residency.add(model, len(decoder.weights), pinned=model in pinned)
            decoder.move(None)

    @property
    def failures(self) -> dict[str, str]:
        """Why a model can't be served, for those that can't."""
        return {model: resident.failure for model, resident in self.residency.residents.items() if resident.failure is not None}

    def on_device(self, models: Collection[str]) -> list[str]:
        """Of these, those all of whose weights are there, or never leave it."""
        return [model for model in models if model not in self._decoders or self._place(model) is Place.DEVICE]

    @property
    def load_seconds(self) -> float:
        """The longest that bringing a model took of late."""
        return max((resident.load_seconds for resident in self.residency.residents.values()), default=0.0)

    def advance(self, work: Mapping[str, int], now: float) -> None:
        """Between steps: notes what has come, and lets come who is next. `work` by model: its most urgent class, 1 .. 3."""
        if self._coming is not None and not self._coming[1].is_alive():
            self._coming[1].join()
            self.residency.arrived(self._coming[0], self._seconds)
            self._coming = None
        move = self.residency.next({model: urgent for model, urgent in work.items() if model in self._decoders}, now)
        if move is None:
            return
        for model in move.evicted:
            self._decoders[model].move(None)
        decoder = self._decoders[move.model]
        try:
            decoder.move(self._memory[move.offset : move.offset + len(decoder.weights)])
        except OSError as error:
            self.residency.fail(move.model, str(error))
            self.on_failure(move.model, str(error))
            return
        thread = threading.Thread(target=self._bring, args=(decoder,), name=f"weights of {move.model}", daemon=True)
        self._coming = move.model, thread
        thread.start()

    def obey(self, kind: Kind, model: str, num_requests: int, now: float) -> Outcome:
        """An act of an operator or a scheduler; `num_requests` are those that the model has."""
        outcome = obey(self.residency, kind, model, num_requests, now)
        if outcome.drop:
            self._decoders[model].move(None)
        return outcome

    def _bring(self, decoder: Movable) -> None:
        started = self._clock()
        decoder.bring()
        self._seconds = self._clock() - started

    def able(self, models: Collection[str]) -> list[str]:
        """Of these, those that can step now; where none can, the one that is arriving: its step waits for each layer."""
        there = [model for model in models if model not in self._decoders or self._place(model) in (Place.DEVICE, Place.COLD)]
        return there or [model for model in models if self._place(model) is Place.ARRIVING]

    def is_there(self, model: str) -> bool:
        """Whether all of it is."""
        return model not in self._decoders or self._place(model) in (Place.DEVICE, Place.COLD)

    def _place(self, model: str) -> Place:
        return self.residency.residents[model].place

    def finish(self) -> None:
        """Returns when nothing is being copied any more."""
        if self._coming is not None:
            self._coming[1].join()


class FailedRunner:
    """In the place of a model that can't be served: every request ends with the reason. Implements Runner."""

    def __init__(self, model: str, reason: str) -> None:
        self._message = f"model {model} can't be served here: {reason}"

    def copy(self, batch: Batch) -> None:
        """There is nothing to copy."""

    def execute(self, batch: Batch) -> list[SpanResult]:
        """SequenceError, for one request after another."""
        sequence = batch.spans[0].sequence
        raise SequenceError(sequence.request_id, sequence.choice_index, self._message)
