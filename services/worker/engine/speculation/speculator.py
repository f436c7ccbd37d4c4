"""How many drafts each sequence of a step gets: as many as bring more tokens per second, by measured acceptance and step times. Pure.

Greedy over the whole batch: the draft most likely to be accepted comes next, as long as its chance outweighs the time that it adds for all.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.worker.engine.batch import Batch, Span
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.acceptance import Acceptance
from services.worker.engine.speculation.drafter import Drafter, Outlook
from services.worker.engine.step_time import StepTime, load_of

_LEAST_RETURN = 1.25  # times what it costs, for each draft: at break-even there is nothing to gain, and estimates to lose by
_LEAST_GAIN = 0.03  # of the tokens per second: less is lost in what the estimates are off by
_PATIENCE = 16  # steps without a draft, after which only each fourth is looked at: looking in vain costs 3 % of a step
_STRIDE = 4
_PROBE_INTERVAL = 64  # steps without a draft for want of gain, after which one is made to see whether that still holds


@dataclass
class SpeculationCounters:
    """Since the start; they only grow."""

    drafts: int = 0  # spans that had drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    runs: list[int] = field(default_factory=list)  # spans by how many of their drafts were accepted, from 0


class _Prospect(NamedTuple):
    """A sequence that can be drafted for in this step."""

    span: int  # its index
    sequence: Sequence
    outlook: Outlook
    chance: float  # that the first draft comes true
    room: int


class Speculator:
    """Asks a drafter, weighs, and learns from what came. At most `max_drafts` tokens per sequence and step.

    `step_time` says what they cost; the batcher teaches it.
    """

    def __init__(self, drafter: Drafter, max_drafts: int, step_time: StepTime | None = None) -> None:
        self.counters = SpeculationCounters(runs=[0] * (max_drafts + 1))
        self._drafter = drafter
        self._max_drafts = max_drafts
        self.step_time = step_time or StepTime()
        self.acceptance = Acceptance(drafter.prior)
        self._outlooks: dict[Sequence, Outlook] = {}  # of this step
        self._num_idle_steps = 0  # since the last draft, or chance of one

    def plan(self, spans: Seq[Span], room: Callable[[Span], int], budget: int) -> list[int]:
        """How many drafts each span should get: at most as there is room for, and `budget` in all."""
        self._outlooks.clear()
        if self._num_idle_steps >= _PATIENCE and self._num_idle_steps % _STRIDE:
            self._num_idle_steps += 1
            return [0] * len(spans)
        tokens, seconds = float(sum(span.samples for span in spans)), self.step_time.seconds(load_of(spans))
        probing = self._num_idle_steps >= _PROBE_INTERVAL
        # Less likely drafts take more time than they bring tokens.
        least_chance = 0.0 if probing else _LEAST_RETURN * tokens * self.step_time.draft_seconds() / seconds
        prospects = self._prospects(spans, room, least_chance)
        counts = [0] * len(spans)
        if not self.step_time.known or budget <= 0:
            return counts
        for prospect, count in zip(prospects, self._best_counts(prospects, tokens, seconds, budget), strict=True):
            counts[prospect.span] = count
        self._num_idle_steps = 0 if any(counts) else self._num_idle_steps + 1
        if probing and prospects and not any(counts):
            counts[max(prospects, key=lambda prospect: prospect.chance).span] = 1
            self._num_idle_steps = _PATIENCE
        return counts

    def _prospects(self, spans: Seq[Span], room: Callable[[Span], int], least_chance: float) -> list[_Prospect]:
        prospects = []
        for index, span in enumerate(spans):
            sequence = span.sequence
            if not span.may_draft or (outlook := self._drafter.outlook(sequence)) is None:
                continue
            self._outlooks[sequence] = outlook
            chance = self.acceptance.chance(sequence, outlook.grade(0))
            if chance > least_chance and (most := min(room(span), self._max_drafts)) > 0:
                prospects.append(_Prospect(index, sequence, outlook, chance, most))
        return prospects

    def _best_counts(self, prospects: Seq[_Prospect], tokens: float, seconds: float, budget: int) -> list[int]:
        """Drafts by prospect, for the most expected tokens per second; none for a gain that is next to nothing."""
        best, best_rate = [0] * len(prospects), tokens / seconds * (1 + _LEAST_GAIN)
        if not prospects:
            return best
        seconds += self.step_time.drafting_seconds()
        # Each pass of a draft model serves all, so how many passes is the first question; others draft as deep as they like for nothing.
        pass_seconds = self._drafter.pass_seconds
        for depth in range(1, self._max_drafts + 1) if pass_seconds else (self._max_drafts,):
            counts, rate = self._share(prospects, tokens, seconds + depth * pass_seconds, depth, budget)
            if rate > best_rate:
                best, best_rate = counts, rate
        return best

    def _share(self, prospects: Seq[_Prospect], tokens: float, seconds: float, depth: int, budget: int) -> tuple[list[int], float]:
        """Drafts by prospect, at most `depth` each, as long as each raises the tokens per second; and what those come to."""
        counts = [0] * len(prospects)
        draft_seconds = self.step_time.draft_seconds()
        queue = [(-prospect.chance, index) for index, prospect in enumerate(prospects)]
        heapq.heapify(queue)
        while queue and budget > 0:
            negative, index = heapq.heappop(queue)
            if -negative * seconds <= _LEAST_RETURN * tokens * draft_seconds:
                break
            tokens -= negative
            seconds += draft_seconds
            budget -= 1
            counts[index] += 1
            prospect = prospects[index]
            if counts[index] < min(prospect.room, depth):
                given = self.acceptance.chance(prospect.sequence, prospect.outlook.grade(counts[index]))
                heapq.heappush(queue, (negative * given, index))
        return counts, tokens / seconds

    def draft(self, batch: Batch) -> Batch:
        """The batch with drafts, as many as it has room for. Its copies have been made: a draft model reads and writes the cache."""
        wanted = [(index, count) for index, count in enumerate(batch.draft_counts) if count > 0]
        if not wanted:
            return batch
        spans = list(batch.spans)
        drafts = self._drafter.draft([(spans[index].sequence, count) for index, count in wanted])
        for (index, _), draft in zip(wanted, drafts, strict=True):
            span = spans[index]
            spans[index] = replace(span, length=span.length + len(draft.token_ids), draft=draft)
        return replace(batch, spans=tuple(spans))

    def judge(self, span: Span, token_ids: Seq[int]) -> int:
        """Learns from the tokens that came of a span; how many of them were drafts of it."""
        outlook = self._outlooks.pop(span.sequence, None)
        drafts = span.draft.token_ids
        num_accepted = 0
        if drafts:
            num_accepted = count_accepted(drafts, token_ids)
            self.counters.drafts += 1
            self.counters.draft_tokens += len(drafts)
            self.counters.accepted_tokens += num_accepted
            self.counters.runs[num_accepted] += 1
        if outlook is not None:
            for depth, (guess, token_id) in enumerate(zip(drafts or (outlook.token_id,), token_ids, strict=False)):
                if guess is not None:
                    self.acceptance.record(span.sequence, outlook.grade(depth), accepted=guess == token_id)
        return num_accepted

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Idempotent."""
        self._outlooks.pop(sequence, None)
        self.acceptance.forget(sequence)
        self._drafter.forget(sequence)


def count_accepted(guesses: Seq[int], token_ids: Seq[int]) -> int:
    """How many tokens from the first on are as guessed."""
    count = 0
    for guess, token_id in zip(guesses, token_ids, strict=False):
        if guess != token_id:
            break
        count += 1
    return count
