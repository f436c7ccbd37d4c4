"""Somebody alternates two models that can't both be on the device, beside one that is, pinned, and has work all the time.

Part of `make bench-sharing`. Compared with the same requests, all to one of the two models: only that they alternate differs.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.figure import line, show
from bench.sharing_device import SMALL, Device, make, request
from services.worker.engine.engine import TokenOutput
from services.worker.sharing.residency import MIN_STAY_SECONDS

RESIDENT, ALTERNATING = "resident", ("a", "b")
GAP_SECONDS = 0.4  # between two requests of the adversary
PROMPT, OUTPUT = 32, 8
LONGEST = SMALL.max_position - 100  # tokens of a request to the resident


@dataclass
class Round:
    """What was seen."""

    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between the resident's tokens
    waits: list[float] = field(default_factory=list)  # of the adversary's requests, to their first token
    num_asked: int = 0
    num_answered: int = 0
    loads: dict[str, int] = field(default_factory=dict)

    def p99(self) -> float:
        """Of the resident's gaps."""
        return sorted(self.gaps)[int(0.99 * len(self.gaps))]


class _Course:
    """One round under way, in real time."""

    def __init__(self, device: Device, models: Sequence[str], seconds: float, name: str) -> None:
        self.device, self.models, self.seconds, self.name = device, models, seconds, name
        self.rng = random.Random(name)
        self.round = Round()
        self.asked: dict[str, float] = {}
        self.last: float | None = None  # when the resident's last token came
        self.resident_id = ""

    def run(self) -> Round:
        """Ends when the adversary's last request has its answer."""
        before = self._loads()
        started = time.perf_counter()
        while True:
            now = time.perf_counter() - started
            if now < self.seconds and now >= self.round.num_asked * GAP_SECONDS and self.models:
                self._ask(now)
            if not self.resident_id:
                self._ask_resident()
            if now >= self.seconds and self.round.num_answered == self.round.num_asked:
                break
            at = time.perf_counter()
            stepped = self.device.shared.step(at)
            ended = time.perf_counter()
            self.device.shared.took(stepped.model, ended - at)
            self._read(stepped.outputs, ended - started)
        self.device.shared.abort(self.resident_id)
        self.round.seconds = time.perf_counter() - started
        self.round.loads = {model: count - before[model] for model, count in self._loads().items()}
        return self.round

    def _ask(self, now: float) -> None:
        model = self.models[self.round.num_asked % len(self.models)]
        name = f"{self.name} {self.round.num_asked}"
        self.device.shared.add(request(name, model, SMALL.vocab_size, self.rng, OUTPUT, PROMPT))
        self.asked[name] = now
        self.round.num_asked += 1

    def _ask_resident(self) -> None:
        self.resident_id, self.last = f"{self.name} resident {self.rng.random()}", None
        self.device.shared.add(request(self.resident_id, RESIDENT, SMALL.vocab_size, self.rng, LONGEST, PROMPT))

    def _read(self, outputs: Sequence[object], now: float) -> None:
        for output in outputs:
            assert isinstance(output, TokenOutput)
            if output.request_id == self.resident_id:
                if self.last is not None:
                    self.round.gaps.append(now - self.last)
                self.last = now
                if output.finish_reason is not None:
                    self.resident_id = ""
                continue
            if output.first_position == 0:
                self.round.waits.append(now - self.asked[output.request_id])
            self.round.num_answered += output.finish_reason is not None and output.error is None

    def _loads(self) -> dict[str, int]:
        assert self.device.weights is not None
        return {model: resident.num_loads for model, resident in self.device.weights.residency.residents.items()}


def adversary(seconds: float, num_rounds: int, num_threads: int) -> None:
    """Prints its figures. Rounds of both kinds alternate, so that what else the machine does meets both."""
    device = make(SMALL, [RESIDENT, *ALTERNATING], 2, 1 << 27, num_threads, pinned=[RESIDENT])
    assert device.weights is not None
    _Course(device, ALTERNATING, 3 * MIN_STAY_SECONDS, "warm").run()
    alternating, steady, alone = [], [], []
    for number in range(num_rounds):
        alternating.append(_Course(device, ALTERNATING, seconds, f"alternating {number}").run())
        steady.append(_Course(device, ALTERNATING[:1], seconds, f"steady {number}").run())
        alone.append(_Course(device, (), seconds / 2, f"alone {number}").run())
    residents = device.weights.residency.residents
    num_asked, num_answered = (sum(getattr(r, name) for r in alternating) for name in ("num_asked", "num_answered"))
    show(line("adversary_answered", num_answered / num_asked, f"of {num_asked} requests", 1.0))
    over = [max(0.0, r.loads[model] - (r.seconds / MIN_STAY_SECONDS + 1)) for r in alternating for model in ALTERNATING]
    num_loads = sum(r.loads[model] for r in alternating for model in ALTERNATING)
    show(line("adversary_loads", num_loads, f"in {sum(r.seconds for r in alternating):.0f} s"))
    show(line("adversary_loads_over_bound", sum(over), "loads over duration / least stay", 0, at_most=True))
    fair = max(residents[model].stay_seconds + residents[model].load_seconds for model in ALTERNATING)
    waits = sorted(wait for r in alternating for wait in r.waits)
    show(line("adversary_wait_median", waits[len(waits) // 2], "s to the first token"))
    show(line("adversary_worst_wait", waits[-1] / fair, f"of a fair wait, {fair:.2f} s: the other's stay, the way here", 5, at_most=True))
    rise = statistics.median(r.p99() for r in alternating) / statistics.median(r.p99() for r in steady)
    show(line("adversary_itl_rise", rise, "of the resident's p99 between tokens beside the same requests to one model", 1.1, at_most=True))
    for name, rounds in (("adversary_itl_p99", alternating), ("steady_itl_p99", steady), ("alone_itl_p99", alone)):
        show(line(name, statistics.median(r.p99() for r in rounds), f"s, median of {num_rounds} rounds"))
