"""How many drafts, and what is learnt: on a simulated device whose step times are known."""

import random

import pytest

from services.worker.engine.batch import Batch, Span
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import RequestState, Sequence
from services.worker.engine.speculation.acceptance import Acceptance
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.speculation.suffix_drafter import SuffixDrafter
from services.worker.engine.step_time import load_of
from tests.drafters import Guesser


def sequence(index: int = 0, tokens: list[int] | None = None) -> Sequence:
    request = EngineRequest(f"r{index}", tokens or [1, 2, 3])
    group = RequestState(request, index, b"", [])
    return Sequence(group, 0, list(request.prompt_token_ids), len(request.prompt_token_ids), 10_000, frozenset(), [])


def drafted(speculator: Speculator, spans: list[Span], counts: list[int]) -> tuple[Span, ...]:
    return speculator.draft(Batch(tuple(spans), draft_counts=tuple(counts))).spans


class Device:
    """Sequences that decode side by side; a draft comes true with `chance` and costs `draft` of a plain step, the first `first` more."""

    def __init__(self, num_sequences: int, chance: float, draft: float, *, pass_share: float = 0.0, first: float = 0.0) -> None:
        self.rng = random.Random(7)
        self.chance = chance
        self.cost = draft
        self.first = first
        self.drafter = Guesser(lambda sequence, drafted: 0)
        self.drafter.pass_seconds = pass_share
        self.speculator = Speculator(self.drafter, 8)
        self.sequences = [sequence(index) for index in range(num_sequences)]
        self.seconds = 0.0
        self.tokens = 0
        self.counts: list[list[int]] = []

    def step(self) -> None:
        spans = [Span(s, s.num_tokens - 1, 1, samples=True) for s in self.sequences]
        counts = self.speculator.plan(spans, lambda _: 20, 1000)
        spans = drafted(self.speculator, spans, counts)
        seconds = 1.0 + self.cost * (sum(span.length for span in spans) - 1) + self.first * any(span.draft.token_ids for span in spans)
        self.speculator.step_time.record(load_of(spans), seconds * self.rng.uniform(0.97, 1.03))
        self.seconds += seconds + max(counts) * self.drafter.pass_seconds
        self.counts.append(counts)
        for span in spans:
            run = [0]
            while len(run) <= len(span.draft.token_ids) and self.rng.random() < self.chance:
                run.append(0)
            tokens = run if len(run) > len(span.draft.token_ids) else [*run[:-1], 1]
            assert self.speculator.judge(span, tokens) == len(tokens) - 1
            span.sequence.tokens += tokens
            self.tokens += len(tokens)

    def gain(self, num_steps: int = 400) -> float:
        """Tokens per second over those without drafts."""
        for _ in range(num_steps):
            self.step()
        without = len(self.sequences) / (1.0 + self.cost * (len(self.sequences) - 1))
        return self.tokens / self.seconds / without


@pytest.mark.parametrize("num_sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.9])
def test_never_much_slower_than_without(num_sequences: int, draft: float, chance: float) -> None:
    assert Device(num_sequences, chance, draft).gain() > 0.95


@pytest.mark.parametrize(("chance", "draft", "gain"), [(0.95, 0.05, 3.5), (0.9, 0.1, 2.2), (0.6, 0.05, 1.6), (1.0, 0.02, 6.0)])
def test_pays_where_it_can(chance: float, draft: float, gain: float) -> None:
    assert Device(1, chance, draft).gain() > gain


def test_more_drafts_where_they_come_true_and_none_where_they_dont() -> None:
    device = Device(1, 0.95, 0.05)
    device.gain(200)
    assert [max(counts) for counts in device.counts[-20:]] == [8] * 20
    device.chance = 0.0
    device.gain(400)
    assert sum(map(max, device.counts[-128:])) <= 4, "but for a probe now and then"
    device.chance = 0.95
    device.gain(2000)
    assert [max(counts) for counts in device.counts[-20:]] == [8] * 20, "a probe has found out"


def test_the_passes_of_a_draft_model_are_reckoned_with() -> None:
    assert Device(1, 0.8, 0.05, pass_share=0.2).gain() > 1.2
    dear = Device(1, 0.8, 0.05, pass_share=2.0)
    assert dear.gain() > 0.9
    assert sum(map(sum, dear.counts[-100:])) <= 5
    assert Device(32, 0.9, 0.01, pass_share=0.3).gain() > 1.3, "one pass serves all"


def test_a_dear_first_draft_is_reckoned_with() -> None:
    assert Device(1, 0.2, 0.05, first=0.4).gain() > 0.95, "one draft is worth .05 to it, and never .4"
    assert Device(1, 0.9, 0.05, first=0.4).gain() > 2, "many drafts are"


def test_a_scarce_budget_goes_to_the_likeliest() -> None:
    device = Device(2, 1.0, 0.05)
    device.gain(100)
    good, bad = device.sequences
    for _ in range(30):
        device.speculator.plan([Span(bad, 2, 1, samples=True)], lambda _: 5, 5)
        device.speculator.judge(drafted(device.speculator, [Span(bad, bad.num_tokens - 1, 1, samples=True)], [1])[0], [1])
    spans = [Span(s, s.num_tokens - 1, 1, samples=True) for s in (bad, good)]
    assert device.speculator.plan(spans, lambda _: 9, 3) == [0, 3]
    assert sum(device.speculator.plan(spans, lambda span: 9 if span is spans[0] else 2, 100)) <= 10, "no more than the room"


def test_a_step_without_spans_is_planned_whatever_was_measured() -> None:
    """Times that fall with the load leave nothing but a price per token, and such a step has none."""
    speculator = Speculator(SuffixDrafter(), 8)
    assert speculator.plan([], lambda _: 8, 8) == []
    text = sequence(tokens=list(range(64)))
    for num_tokens in (1, 2, 4, 8, 16, 32) * 6:
        speculator.step_time.record(load_of([Span(text, 0, num_tokens, samples=False)]), 0.001 * num_tokens**2)
    assert speculator.plan([], lambda _: 8, 8) == []


def test_a_guess_that_costs_nothing_is_judged_unseen() -> None:
    """A lookup learns that it would have been right without a single draft."""
    speculator = Speculator(SuffixDrafter(), 8)
    text = sequence(tokens=[1, 2, 3, 4, 5] * 3)
    for _ in range(12):
        span = Span(text, text.num_tokens - 1, 1, samples=True)
        assert speculator.plan([span], lambda _: 8, 8) == [0], "no step was timed yet"
        following = text.tokens[-5]
        assert speculator.judge(span, [following]) == 0
        text.tokens.append(following)
    for _ in range(8):
        speculator.step_time.record(load_of([Span(text, 3, 1, samples=True)]), 0.01)
    assert speculator.plan([Span(text, text.num_tokens - 1, 1, samples=True)], lambda _: 8, 8) == [8]
    assert speculator.counters.draft_tokens == 0


def test_what_is_behind_a_miss_is_no_outcome() -> None:
    """The second of two wrong drafts continued another text: its grade learns nothing."""
    drafter = Guesser(lambda sequence, drafted: 0, grades=(0, 1), prior=(0.5, 0.5))
    speculator = Speculator(drafter, 8)
    for _ in range(8):
        speculator.step_time.record(load_of([Span(sequence(), 2, 1, samples=True)]), 0.01)
    text = sequence()
    span = Span(text, 2, 1, samples=True)
    counts = speculator.plan([span], lambda _: 2, 8)
    assert counts == [2]
    assert speculator.judge(drafted(speculator, [span], counts)[0], [1]) == 0
    assert speculator.acceptance.chance(text, 0) < 0.5
    assert speculator.acceptance.chance(text, 1) == 0.5


def test_a_sequence_leans_on_what_all_have_seen() -> None:
    acceptance = Acceptance((0.5,))
    text = sequence()
    for _ in range(8):
        acceptance.record(text, 0, accepted=True)
    assert acceptance.chance(sequence(1), 0) < acceptance.chance(text, 0)
    acceptance.forget(text)
    assert 0.5 < acceptance.chance(text, 0) < 0.9, "what it taught about all stays"


def test_the_load_counts_tokens_rows_and_keys() -> None:
    spans = [Span(sequence(tokens=list(range(10))), 9, 1, samples=True), Span(sequence(tokens=list(range(30))), 0, 20, samples=False)]
    load = load_of(spans)
    assert (load.num_tokens, load.num_rows, load.num_keys) == (21, 1, 30)


def test_what_was_in_vain_for_long_is_looked_at_now_and_then_and_found_again() -> None:
    device = Device(1, 0.0, 0.5)
    looks = []
    outlook = device.drafter.outlook
    device.drafter.outlook = lambda sequence: outlook(looks.append(sequence) or sequence)  # type: ignore[method-assign]
    device.gain(400)
    assert len(looks) < 150
    device.chance, device.cost = 1.0, 0.02
    device.gain(400)
    assert sum(counts[0] > 0 for counts in device.counts[-50:]) == 50
