"""Runs and rules: the Gumbel rule's run of equals, and the paper's rule against adversarial drafters."""

import pytest
import torch
from torch import Tensor

from services.worker.engine.batch import Draft, Span, SpanResult
from services.worker.engine.noise import noise_keys
from services.worker.engine.request import EngineRequest, PositionLogprobs, SamplingParams, TokenLogprob
from services.worker.engine.sampler import Sample, SampleRow, distribution, noise_key_columns, sample
from services.worker.engine.sequence import RequestState, Sequence
from services.worker.engine.verification import RejectionRule, accept, draw, residual, sample_rows, take_run

PLAIN = SamplingParams()


def sequence(sampling: SamplingParams = PLAIN, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    group = RequestState(EngineRequest("r", [5, 6, 7], sampling), 0, b"", [])
    return Sequence(group, 2, [5, 6, 7, 8], 3, 100, stop_ids, [])


def drafted(*token_ids: int, sampling: SamplingParams = PLAIN) -> Span:
    return Span(sequence(sampling), 3, 1 + len(token_ids), samples=True, draft=Draft(token_ids))


# --- spans and runs


def test_a_span_with_a_draft_computes_and_samples_behind_its_last_token() -> None:
    span = drafted(10, 11)
    assert (span.token_ids, list(span.sampled), span.logit_positions, span.end) == ([8, 10, 11], [3, 4, 5], [3, 4, 5], 6)
    prompt = Span(sequence(), 0, 4, samples=True, scored=range(2))
    assert (prompt.token_ids, prompt.logit_positions) == ([5, 6, 7, 8], [0, 1, 3])
    chunk = Span(sequence(), 1, 2, samples=False)
    assert (chunk.token_ids, chunk.logit_positions) == ([6, 7], [])
    drafting = Span(sequence(), 5, 1, samples=True, draft=Draft((10, 11)))
    assert (drafting.token_ids, drafting.logit_positions) == ([11], [5]), "a draft model computes one token more each time"


def test_rows_know_the_draft_up_to_them_and_the_bans_of_their_place() -> None:
    span = Span(sequence(SamplingParams(min_tokens=3), frozenset({1})), 3, 4, samples=True, draft=Draft((10, 11, 12)))
    rows = sample_rows(span)
    assert [row.tokens for row in rows] == [[5, 6, 7, 8], [5, 6, 7, 8, 10], [5, 6, 7, 8, 10, 11], [5, 6, 7, 8, 10, 11, 12]]
    assert [row.position for row in rows] == [1, 2, 3, 4]
    assert [set(row.banned_ids) for row in rows] == [{1}, {1}, set(), set()]
    assert {row.choice_index for row in rows} == {2}


@pytest.mark.parametrize(
    ("samples", "run"),
    [([10, 11, 12], [10, 11, 12]), ([10, 9, 12], [10, 9]), ([9, 11, 12], [9])],
)
def test_the_run_ends_with_the_first_token_that_is_no_draft(samples: list[int], run: list[int]) -> None:
    result = SpanResult()
    logprobs = [PositionLogprobs(TokenLogprob(token, -1.0)) for token in samples]
    take_run(drafted(10, 11), list(map(Sample, samples, logprobs)), result)
    assert result.token_ids == run
    assert [position.chosen.token_id for position in result.logprobs] == run


def test_an_error_counts_only_where_the_run_comes_to_it() -> None:
    failed = Sample(-1, error="broken")
    first, second, behind = SpanResult(), SpanResult(), SpanResult()
    take_run(drafted(10, 11), [failed, Sample(11), Sample(12)], first)
    take_run(drafted(10, 11), [Sample(10), failed, Sample(12)], second)
    take_run(drafted(10, 11), [Sample(9), failed, failed], behind)
    assert first.error is not None
    assert first.token_ids == []
    assert (second.token_ids, second.error) == ([10], None), "the next step meets it first"
    assert (behind.token_ids, behind.error) == ([9], None)


# --- the paper's rule

VOCAB = 6
DRAWS = 1_000_000
TARGET = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
DRAFTERS = {
    "equal": TARGET,
    "disjoint": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    "one-hot": torch.nn.functional.one_hot(torch.tensor(1), VOCAB).float(),
    "opposite": TARGET.flip(0),
    "uniform": torch.full((VOCAB,), 1 / VOCAB),
    "near": TARGET + torch.tensor([1e-7, -1e-7, 0, 0, 0, 0]),
}


def keys_of(stream: int, count: int = DRAWS) -> Tensor:
    """[2, count] noise keys, as different as those of as many positions."""
    generator = torch.Generator().manual_seed(stream)
    return torch.randint(-(2**31), 2**31, (2, count), generator=generator, dtype=torch.int64).int()


def distance(tokens: Tensor, expected: Tensor) -> float:
    """Total variation between the tokens' shares and a distribution."""
    shares = torch.bincount(tokens, minlength=len(expected)).double() / len(tokens)
    return 0.5 * (shares - expected.double()).abs().sum().item()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_million_draws_are_the_targets_whatever_drafts(name: str) -> None:
    draft = DRAFTERS[name]
    target = TARGET
    if name == "disjoint":  # nothing in common: every draft is refused
        target = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05, 0.0])
    guesses = draw(draft.expand(DRAWS, -1), keys_of(1))
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    accepted = accept(target.expand(DRAWS, -1), draft.expand(DRAWS, -1), guesses, uniforms)
    tokens = torch.where(accepted, guesses, draw(residual(target, draft).expand(DRAWS, -1), keys_of(3)))
    assert distance(tokens, target) <= 0.003
    overlap = torch.minimum(target, draft).sum().item()
    assert accepted.double().mean().item() == pytest.approx(overlap, abs=0.003), "the paper's acceptance, 1 - TV(p, q)"


def test_pairs_of_tokens_are_the_targets_too() -> None:
    """Runs of two under a target that depends on the token before: 16 pairs and a draft that is wrong about each."""
    generator = torch.Generator().manual_seed(0)
    first = torch.softmax(torch.randn(4, generator=generator), -1)
    second = torch.softmax(torch.randn(4, 4, generator=generator) * 2, -1)  # behind each first token
    draft_first, draft_second = first.flip(0), second.flip(1)
    uniforms = torch.rand(2, DRAWS, generator=generator, dtype=torch.float64)

    def token(target: Tensor, draft: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        guesses = draw(draft, keys_of(stream))
        accepted = accept(target, draft, guesses, uniforms[stream // 10])
        return torch.where(accepted, guesses, draw(residual(target, draft), keys_of(stream + 1))), accepted

    one, kept = token(first.expand(DRAWS, -1), draft_first.expand(DRAWS, -1), 1)
    two, _ = token(second[one], draft_second[one], 11)
    two = torch.where(kept, two, draw(second[one], keys_of(20)))  # behind a refusal, the next step draws as ever
    expected = (first[:, None] * second).flatten()
    assert distance(one * 4 + two, expected) <= 0.003


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_b01_the_rule_knows_the_requests_own_temperature_and_filters(temperature: float) -> None:
    """20,000 rows under top-p and a penalty, drafted by a model that knows neither: chi-square against plain sampling."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB, generator=generator) * 0.5
    sampling = SamplingParams(temperature=temperature, top_p=0.8, presence_penalty=0.5)
    draft = torch.softmax(torch.randn(VOCAB, generator=generator), -1)
    tokens, count = [], 20_000
    guesses = draw(draft.expand(count, -1), keys_of(5, count)).tolist()
    for start in range(0, count, 2000):
        spans = []
        for index in range(start, start + 2000):
            request = EngineRequest("r", [0], SamplingParams(**{**vars(sampling), "seed": index}))
            text = Sequence(RequestState(request, 0, b"", []), 0, [0, 1], 1, 100, frozenset(), [])
            spans.append(Span(text, 1, 2, samples=True, draft=Draft((guesses[index],), draft[None])))
        rows = [row for span in spans for row in sample_rows(span)]
        chosen = sample(logits.expand(len(rows), -1).clone(), rows, RejectionRule(spans).choose)
        tokens += [row.token_id for row in chosen[::2]]
    processed = logits.clone()
    processed[1] -= 0.5
    row = SampleRow(sampling, 0, [0, 1], 1)
    expected = distribution(processed[None], processed.amax()[None], [row])[0]
    assert 2 <= (expected > 0).sum() < VOCAB, "top-p has cut something"
    assert chi_square_p(torch.tensor(tokens), expected) > 0.01


def chi_square_p(tokens: Tensor, expected: Tensor) -> float:
    """Of the tokens' counts under a distribution; 0 where one came that can't."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    wanted = expected[possible].double() / expected.double().sum() * len(tokens)
    statistic = ((counts[possible] - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def test_greedy_rows_take_the_argmax_under_the_rejection_rule_too() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(-1).tolist()
    span = drafted(best[0], (best[1] + 1) % VOCAB, sampling=SamplingParams(temperature=0))
    chosen = sample(logits.clone(), sample_rows(span), RejectionRule([span]).choose)
    assert [row.token_id for row in chosen] == best


def test_keys_come_by_row() -> None:
    rows = [SampleRow(SamplingParams(seed=3), 1, [1, 2, 3], 1), SampleRow(SamplingParams(seed=4), 0, [1], 1)]
    assert noise_key_columns(rows, torch.device("cpu"), 2).t().tolist() == [list(noise_keys(3, 1, 2, 2)), list(noise_keys(4, 0, 0, 2))]
