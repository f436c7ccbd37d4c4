"""What deadlines make of a step: how many tokens it may compute, and who goes first. Pure: the time is an argument.

Sequences that decode towards a TPOT target bound the step: a prompt's tokens make it longer for all. Without targets nothing is bounded.
"""

import math
from collections.abc import Sequence as Seq

from services.worker.engine.composition import FLOOR_PARTS
from services.worker.engine.sequence import Sequence
from services.worker.engine.step_time import Load, StepTime

LEAST_PARTS = 8  # one of so many parts of the largest step is for prompts however tight the targets are: they have deadlines, too
URGENT_STEPS = 2.0  # a token that is due within as many steps can't be left out of this one


def max_tokens(running: Seq[Sequence], most: int, step_time: StepTime, now: float) -> int:
    """Tokens that the step may compute, at most `most`: as many as let each decoding sequence stay in its envelope.

    One that is late already has a whole TPOT target's time: the step can't make up for that, and prompts must go on.
    """
    num_decoding = num_keys = 0
    allowed = math.inf
    for sequence in running:
        if sequence.num_lacking_tokens > 1:
            continue
        num_decoding += 1
        num_keys += sequence.num_tokens
        envelope = sequence.group.envelope
        if envelope.tpot_seconds:
            allowed = min(allowed, max(envelope.slack(sequence.num_output_tokens, now), envelope.tpot_seconds))
    if allowed == math.inf or not step_time.known or not (token_seconds := step_time.token_seconds()):
        return most
    spare = allowed - step_time.seconds(Load(num_decoding, num_decoding, num_keys))
    return min(most, num_decoding + max(most // LEAST_PARTS, 1, int(spare / token_seconds)))


def in_order(running: Seq[Sequence], step_seconds: float, now: float) -> list[Sequence]:
    """Urgent decodes, prompts by class and deadline, decodes with slack. `running` by class and arrival.

    Decodes without a target count as urgent: they ride along for little, and nothing would make them urgent later.
    """
    urgent: list[Sequence] = []
    prompts: list[Sequence] = []
    relaxed: list[Sequence] = []
    for sequence in running:
        if sequence.num_lacking_tokens > 1:
            prompts.append(sequence)
        elif sequence.group.envelope.slack(sequence.num_output_tokens, now) > URGENT_STEPS * step_seconds:
            (relaxed if sequence.group.envelope.tpot_seconds else urgent).append(sequence)
        else:
            urgent.append(sequence)
    if len(prompts) > 1:
        prompts.sort(key=lambda s: (s.latency_class, s.group.envelope.first_due))
    return urgent + prompts + relaxed


def kept_back(order: Seq[Sequence]) -> dict[int, float]:
    """By class, the part of a step's tokens that its prompts leave to those of lower classes: a floor for each that has any."""
    classes = sorted({sequence.latency_class for sequence in order if sequence.num_lacking_tokens > 1})
    return {latency_class: (len(classes) - 1 - rank) / FLOOR_PARTS for rank, latency_class in enumerate(classes)}
