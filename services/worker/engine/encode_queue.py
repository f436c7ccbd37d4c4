"""Which inputs the encoder's next step takes. Ints only: it knows no vector and no clock.

More urgent classes come first. In a class requests share a step's tokens, so that a small one isn't kept by a large one before it. A class
that was left out of many steps begins the next one, so that none starves.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from services.worker.engine.request import LATENCY_CLASSES, InvalidRequest, RequestTooLarge

FLOOR_STEPS = 16
"""A class with work is in one step of so many at least."""


@dataclass(frozen=True)
class EncodeRequest:
    """Inputs to turn into vectors. `dimensions`: how many numbers of each vector are wanted, from the first; None: all."""

    request_id: str
    inputs: Sequence[Sequence[int]]
    latency_class: int = 2  # 1 realtime, 2 standard, 3 batch
    dimensions: int | None = None
    model: str = ""  # whose engine it is for, where a device has several; an engine doesn't look
    num_open_choices: ClassVar[int] = 1  # it ends once


@dataclass(frozen=True)
class Pick:
    """Inputs of one request, by index."""

    request: EncodeRequest
    indexes: list[int]
    is_last: bool  # nothing of the request is left behind them


@dataclass
class _Waiting:
    """What is left of a request: inputs of like length lie together, which leaves little to pad."""

    request: EncodeRequest
    left: deque[int]
    num_taken: int = 0
    picked: list[int] = field(default_factory=list)  # for the step that is being put together

    def take(self, most: int, *, at_least_one: bool) -> int:
        """Picks inputs of `most` tokens together. Their tokens."""
        num_tokens = 0
        while self.left:
            length = len(self.request.inputs[self.left[0]])
            if num_tokens + length > most and not (at_least_one and num_tokens == 0):
                break
            self.picked.append(self.left.popleft())
            num_tokens += length
        self.num_taken += num_tokens
        return num_tokens

    def pick(self) -> Pick:
        """What it has for this step."""
        indexes, self.picked = self.picked, []
        return Pick(self.request, indexes, is_last=not self.left)


class EncodeQueue:
    """The requests that have inputs left."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[_Waiting]] = {latency_class: deque() for latency_class in LATENCY_CLASSES}
        self._left_out = dict.fromkeys(LATENCY_CLASSES, 0)  # steps since a class with work was in one

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing was taken yet."""
        return sum(waiting.num_taken == 0 for waiting in self._all())

    @property
    def most_urgent_class(self) -> int:
        """Of what is left; batch where nothing is."""
        return min((latency_class for latency_class, line in self._lines.items() if line), default=LATENCY_CLASSES[-1])

    def add(self, request: EncodeRequest) -> None:
        """Queues a request; see check."""
        inputs = request.inputs
        left = deque(sorted(range(len(inputs)), key=lambda index: len(inputs[index])))
        self._lines[request.latency_class].append(_Waiting(request, left))

    def abort(self, request_id: str) -> None:
        """Forgets a request. Idempotent."""
        for line in self._lines.values():
            for waiting in [waiting for waiting in line if waiting.request.request_id == request_id]:
                line.remove(waiting)

    def choose(self, max_tokens: int) -> list[Pick]:
        """Inputs of `max_tokens` together, or a single longer one. Empty only where nothing is left."""
        left = max_tokens
        picks: list[Pick] = []
        for latency_class in self._order():
            line = self._lines[latency_class]
            left, taken = _share(line, left, at_least_one=not picks)
            self._left_out[latency_class] = 0 if taken or not line else self._left_out[latency_class] + 1
            picks += taken
        return picks

    def progress(self) -> list[tuple[str, int]]:
        """(request id, tokens taken) of every request that has inputs left."""
        return [(waiting.request.request_id, waiting.num_taken) for waiting in self._all()]

    def check_integrity(self) -> None:
        """Asserts that whatever is queued has inputs left, in the line of its class, and is there once."""
        assert all(waiting.left and not waiting.picked for waiting in self._all())
        assert all(waiting.request.latency_class == latency_class for latency_class, line in self._lines.items() for waiting in line)
        assert len({waiting.request.request_id for waiting in self._all()}) == len(self)

    def _all(self) -> Iterator[_Waiting]:
        for line in self._lines.values():
            yield from line

    def _order(self) -> list[int]:
        return sorted(LATENCY_CLASSES, key=lambda latency_class: (self._left_out[latency_class] < FLOOR_STEPS, latency_class))


def _share(line: deque[_Waiting], left: int, *, at_least_one: bool) -> tuple[int, list[Pick]]:
    """Each request's part of the tokens that are left, then to whoever can use it what remains; what nobody could use, and the picks."""
    for fair in (True, False):
        for number, waiting in enumerate(line):
            share = left // (len(line) - number) if fair else left
            left -= waiting.take(share, at_least_one=at_least_one and number == 0 and not fair and not any(w.picked for w in line))
    picks = [waiting.pick() for waiting in line if waiting.picked]
    line.rotate(-1)  # another is the first to have a remainder, or the step to itself
    for waiting in [waiting for waiting in line if not waiting.left]:
        line.remove(waiting)
    return max(0, left), picks


def check(request: EncodeRequest, *, vocab_size: int, max_input_len: int, hidden_size: int) -> None:
    """Raises InvalidRequest or RequestTooLarge for what can't be computed. The gateway's table is stricter; this is the last line."""
    if request.latency_class not in LATENCY_CLASSES:
        raise InvalidRequest(f"latency_class is {request.latency_class}; it must be one of {LATENCY_CLASSES}")
    if not request.inputs:
        raise InvalidRequest("inputs is empty; there must be at least one")
    if request.dimensions is not None and not 1 <= request.dimensions <= hidden_size:
        raise InvalidRequest(f"dimensions is {request.dimensions}; it must be from 1 to {hidden_size}")
    for index, ids in enumerate(request.inputs):
        if not ids:
            raise InvalidRequest(f"inputs[{index}] is empty; an input needs at least one token")
        if len(ids) > max_input_len:
            raise RequestTooLarge(f"inputs[{index}] has {len(ids)} tokens; this encoder takes at most {max_input_len}")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise InvalidRequest(f"inputs[{index}] holds {min(ids)} .. {max(ids)}; token ids must be from 0 to {vocab_size - 1}")
