"""What deadlines make of a step: by when it has to end, and who goes first. Pure: the time is an argument.

Two promises bound a step. Sequences that decode towards a TPOT target want their next token: a prompt's tokens make the step longer for
all. And a newcomer with a TTFT target finds a step under way: lower classes are in it as far as it stays short beside that target, and
shorter still while the newcomer's prompt is computed. Without targets nothing is bounded.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.worker.engine.composition import FLOOR_PARTS
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import Sequence
from services.worker.engine.step_time import Load, StepTime

LEAST_PARTS = 8  # one of so many parts of the largest step is for prompts however tight TPOT targets are: they have deadlines, too
URGENT_STEPS = 2.0  # a token that is due within as many steps can't be left out of this one
NEWCOMER_PARTS = 5.0  # one of so many parts of its TTFT target a newcomer may wait for the step under way
PROMPT_PARTS = 20.0  # and its own steps take one of so many
FIXED_PARTS = 2.0  # but no step is cut shorter than so many times what it takes without a token: the device would do little else
EXPECTED_SECONDS = 10.0  # a class that had a request so lately may have another
MAX_SKIPS = 4  # steps in a row that a sequence is left out of for what others were promised; it is in the next one then


@dataclass
class Newcomers:
    """The first-token targets of each class's latest request, and when it came: another may come during a step."""

    _latest: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note(self, request: EngineRequest, now: float) -> None:
        """One that has come."""
        if request.ttft_target_seconds:
            self._latest[request.latency_class] = request.ttft_target_seconds, now

    def targets(self, now: float) -> dict[int, float]:
        """Seconds by class, of those of which another may come."""
        return {latency_class: target for latency_class, (target, came) in self._latest.items() if now - came < EXPECTED_SECONDS}


@dataclass(frozen=True)
class Limits:
    """Seconds that the step may take with a sequence in it."""

    tpot_seconds: float = math.inf  # with a prompt's tokens
    newcomers: dict[int, float] = field(default_factory=dict)  # with one of a lower class than this

    def seconds(self, sequence: Sequence) -> float:
        """For that sequence."""
        own = self.tpot_seconds if sequence.num_lacking_tokens > 1 else math.inf
        return min([own, *(seconds for latency_class, seconds in self.newcomers.items() if latency_class < sequence.latency_class)])


def limits(running: Seq[Sequence], newcomers: Newcomers, most_tokens: int, step_time: StepTime, now: float) -> Limits:
    """Of the next step, which computes at most so many tokens."""
    if not step_time.known:
        return Limits()
    prompts = {sequence.latency_class for sequence in running if sequence.num_lacking_tokens > 1}
    least = FIXED_PARTS * step_time.seconds(Load(0, 0, 0))
    return Limits(
        _tpot_seconds(running, most_tokens, step_time, now),
        {
            latency_class: max(target / (PROMPT_PARTS if latency_class in prompts else NEWCOMER_PARTS), least)
            for latency_class, target in newcomers.targets(now).items()
        },
    )


def _tpot_seconds(running: Iterable[Sequence], most_tokens: int, step_time: StepTime, now: float) -> float:
    """What lets each decoding sequence stay in its envelope.

    One that is late already has a whole TPOT target's time: the step can't make up for that, and prompts must go on.
    """
    decodes = [sequence for sequence in running if sequence.num_lacking_tokens == 1]
    allowed = math.inf
    for sequence in decodes:
        envelope = sequence.group.envelope
        if envelope.tpot_seconds:
            allowed = min(allowed, max(envelope.slack(sequence.num_output_tokens, now), envelope.tpot_seconds))
    if allowed == math.inf:
        return allowed
    decoding = step_time.seconds(Load(len(decodes), len(decodes), sum(sequence.num_tokens for sequence in decodes)))
    return max(allowed, decoding + max(most_tokens // LEAST_PARTS, 1) * step_time.token_seconds())


def in_order(running: Seq[Sequence], step_seconds: float, now: float) -> list[Sequence]:
    """Urgent decodes, and whoever was left out too often; by class decodes without a target, the longest left out first, and prompts by
    deadline; decodes with slack.

    Decodes without a target ride along for little, and nothing would make them urgent later. `running` by class and arrival.
    """
    urgent: list[Sequence] = []
    others: list[Sequence] = []
    relaxed: list[Sequence] = []
    for sequence in running:
        envelope = sequence.group.envelope
        is_prompt = sequence.num_lacking_tokens > 1
        if not is_prompt and sequence.num_skips >= MAX_SKIPS:
            urgent.append(sequence)
        elif is_prompt or not envelope.tpot_seconds:
            others.append(sequence)
        elif envelope.slack(sequence.num_output_tokens, now) > URGENT_STEPS * step_seconds:
            relaxed.append(sequence)
        else:
            urgent.append(sequence)
    others.sort(key=_among_others)
    return urgent + others + relaxed


def _among_others(sequence: Sequence) -> tuple[int, bool, float]:
    is_prompt = sequence.num_lacking_tokens > 1
    return sequence.latency_class, is_prompt, sequence.group.envelope.first_due if is_prompt else -sequence.num_skips


def kept_back(order: Seq[Sequence]) -> dict[Sequence, float]:
    """The part of a step's tokens that a prompt leaves to those of lower classes: a floor for each class that runs."""
    classes = sorted({sequence.latency_class for sequence in order}, reverse=True)
    return {s: classes.index(s.latency_class) / FLOOR_PARTS for s in order if s.num_lacking_tokens > 1}
