"""The sampler against slow, obvious references: the right distribution, the right row."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from services.worker.engine.noise import gumbel, noise_keys
from services.worker.engine.request import SamplingParams
from services.worker.engine.sampler import SampleRow, peaks_of, sample, score
from tests.tiny_models import kernels

pytestmark = pytest.mark.timeout(300)  # the first test for a target may have to compile it


@pytest.fixture(params=["native", "v3", "torch"], autouse=True)
def _by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with the kernels, on wide vectors and on narrow ones, and without."""
    compiled = None if request.param == "torch" else kernels(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.worker.engine.sampler.library.find", lambda: compiled)
        yield


def row(sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None, **fields: object) -> SampleRow:
    prompt = [0] if prompt is None else prompt
    return SampleRow(sampling, fields.pop("choice_index", 0), prompt + (output or []), len(prompt), **fields)  # type: ignore[arg-type]


def pick(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    samples = sample(logits.clone(), rows)
    assert not [s.error for s in samples if s.error]
    return [s.token_id for s in samples]


# --- an obvious reference: one row, plain Python


def processed(logits: list[float], r: SampleRow) -> list[float]:
    """Penalties, bias and bans, token by token."""
    s, output = r.sampling, list(r.tokens[r.num_prompt_tokens :])
    result = []
    for token, x in enumerate(logits):
        if token in r.tokens:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        if token in output:
            x -= s.frequency_penalty * output.count(token) + s.presence_penalty
        bias = s.logit_bias.get(token, 0)
        x = -math.inf if bias <= -100 or token in r.banned_ids else x + bias
        result.append(x)
    return result


def distribution(logits: list[float], r: SampleRow) -> list[float]:
    """What the row's token is drawn from."""
    s, xs = r.sampling, processed(logits, r)
    xs = [(x - max(xs)) / s.temperature for x in xs]
    ranked = sorted(xs, reverse=True)
    if 0 < s.top_k < len(xs):
        xs = [x if x >= ranked[s.top_k - 1] else -math.inf for x in xs]
    ps = _softmax(xs)
    mass, floor = 0.0, 0.0
    for p in sorted(ps, reverse=True):
        if mass >= s.top_p:
            break
        mass, floor = mass + p, p
    kept = [p if p >= floor and p >= s.min_p * max(ps) else 0.0 for p in ps]
    return [p / sum(kept) for p in kept]


def _softmax(xs: list[float]) -> list[float]:
    weights = [math.exp(x - max(xs)) for x in xs]
    return [w / sum(weights) for w in weights]


# --- the distribution


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
        {"logit_bias": {3: 2.0, 1: -100.0}},
    ],
    ids=str,
)
def test_the_gumbel_rule_draws_from_the_softmax(fields: dict[str, object]) -> None:
    """Chi-square over 20,000 draws at the positions of one seed; the critical value is that of p = .001."""
    vocab, draws = 16, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    sampling = SamplingParams(seed=11, **fields)  # type: ignore[arg-type]
    counts = [0] * vocab
    for start in range(0, draws, 4000):
        rows = [SampleRow(sampling, 0, range(start + i + 1), 1) for i in range(4000)]  # type: ignore[arg-type]
        for token in pick(logits.repeat(4000, 1), rows):
            counts[token] += 1
    expected = distribution(logits.tolist(), row(sampling))
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    cells = [(count, p * draws) for count, p in zip(counts, expected, strict=True) if p > 0]
    chi_square = sum((count - e) ** 2 / e for count, e in cells)
    freedom = len(cells) - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert chi_square < critical


# --- rows of a mixed batch

VOCAB = 300
TOKEN = st.integers(0, VOCAB - 1)


@st.composite
def a_row(draw: st.DrawFn) -> SampleRow:
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-30, 0.7, 1.0, 1.0, 3.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.999, 1e-9])),
        top_k=draw(st.sampled_from([0, -1, 1, 5, 280, VOCAB, 9_999_999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        logit_bias=draw(st.dictionaries(TOKEN, st.sampled_from([-100.0, -5.0, 5.0, 100.0]), max_size=4)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
    )
    prompt = draw(st.lists(TOKEN, min_size=1, max_size=8))
    output = draw(st.lists(TOKEN, max_size=8))
    return row(sampling, prompt, output, choice_index=draw(st.integers(0, 15)), banned_ids=draw(st.frozensets(TOKEN, max_size=3)))


@given(st.lists(a_row(), min_size=2, max_size=12), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_row_doesnt_notice_its_neighbours(rows: list[SampleRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    together = sample(logits.clone(), rows)
    for index, r in enumerate(rows):
        assert sample(logits[index : index + 1].clone(), [r]) == [together[index]]


@given(a_row(), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_a_row_is_what_plain_python_makes_of_it(r: SampleRow, seed: int) -> None:
    """Greedy: the argmax. Sampled: of the reference's distribution, the token whose logit plus noise is greatest."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    xs = processed(logits[0].tolist(), r)
    if r.sampling.temperature == 0:
        expected = xs.index(max(xs))
    else:
        temperature = max(r.sampling.temperature, 1e-6)
        r = SampleRow(**{**vars(r), "sampling": SamplingParams(**{**vars(r.sampling), "temperature": temperature})})
        keys = torch.tensor(noise_keys(r.sampling.seed or 0, r.choice_index, r.position), dtype=torch.int32)
        noise = gumbel(torch.arange(VOCAB, dtype=torch.int32), keys.unsqueeze(-1)).tolist()
        loud = [
            (x - max(xs)) / temperature + g if p > 0 else -math.inf
            for x, g, p in zip(xs, noise, distribution(logits[0].tolist(), r), strict=True)
        ]
        expected = loud.index(max(loud))
    (got,) = sample(logits.clone(), [r])
    assert got.token_id == expected
    if r.sampling.logprobs is not None:
        reference = torch.log_softmax(logits[0].double(), -1)
        assert got.logprobs is not None
        assert got.logprobs.chosen.logprob == pytest.approx(reference[expected].item(), abs=1e-5)
        best = reference.topk(r.sampling.logprobs)
        assert [t.token_id for t in got.logprobs.top] == best.indices.tolist()
        assert [t.logprob for t in got.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    else:
        assert got.logprobs is None


def test_a_nucleus_wider_than_the_first_look_is_found_whole() -> None:
    """Flat logits over 1,000 tokens and top_p .9: the 256 likeliest hold a quarter of the mass."""
    logits = torch.linspace(0, 0.01, 1000).repeat(2000, 1)
    sampling = SamplingParams(seed=1, top_p=0.9)
    tokens = pick(logits, [SampleRow(sampling, 0, range(i + 1), 1) for i in range(2000)])  # type: ignore[arg-type]
    assert min(tokens) >= 99
    assert min(tokens) < 120
    assert len(set(tokens)) > 700


def test_equal_logits_at_the_cut_survive_together() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]]).repeat(300, 1)
    rows = [SampleRow(SamplingParams(seed=1, top_k=2), 0, range(i + 1), 1) for i in range(300)]  # type: ignore[arg-type]
    assert set(pick(logits, rows)) == {0, 1, 2}


@pytest.mark.parametrize("fields", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-30}, {"temperature": 0.0}], ids=str)
def test_b32_each_limit_is_greedy(fields: dict[str, float]) -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))
    rows = [row(SamplingParams(seed=index, **fields)) for index in range(50)]  # type: ignore[arg-type]
    assert pick(logits, rows) == logits.argmax(-1).tolist()


def test_huge_temperatures_are_nearly_uniform_and_finite() -> None:
    logits = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)) * 10
    tokens = pick(logits, [row(SamplingParams(seed=index, temperature=1e38)) for index in range(400)])
    assert len(set(tokens)) > 55


# --- rows that can't be sampled


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5, "top_k": 3, "logprobs": 2}], ids=["plain", "filtered"])
def test_f18_a_row_of_nan_fails_alone(temperature: float, fields: dict[str, object]) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    rows = [row(SamplingParams(seed=index, temperature=temperature, **fields)) for index in range(5)]  # type: ignore[arg-type]
    healthy = sample(logits.clone(), rows)
    broken = logits.clone()
    broken[1, 7] = float("nan")
    broken[3] = float("inf")
    got = sample(broken, rows)
    assert [s.error for s in got] == [None, "the model's logits are nan", None, "the model's logits are inf", None]
    assert [got[i] for i in (0, 2, 4)] == [healthy[i] for i in (0, 2, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b30_all_banned_is_an_error_and_one_left_is_that_one(temperature: float) -> None:
    bans = dict.fromkeys(range(40), -100.0)
    logits = torch.randn(2, 40)
    one_left = {token: -100.0 for token in range(40) if token != 13}
    rows = [row(SamplingParams(seed=1, temperature=temperature, top_p=0.5, logit_bias=bias)) for bias in (bans, one_left)]
    banned, forced = sample(logits, rows)
    assert banned.error is not None
    assert "every token is banned" in banned.error
    assert (forced.token_id, forced.error) == (13, None)


def mask_of(tokens: set[int], vocab: int) -> bytes:
    return bytes(sum((8 * byte + bit in tokens) << bit for bit in range(8)) for byte in range(-(-vocab // 8)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_what_it_allows_and_neighbours_and_logprobs_as_they_are(temperature: float) -> None:
    logits = torch.randn(4, 43, generator=torch.Generator().manual_seed(3))
    plain = [row(SamplingParams(seed=index, temperature=temperature, logprobs=3)) for index in range(4)]
    masks = [None, *(mask_of(tokens, 43) for tokens in ({7}, {1, 40, 42}, set(range(43))))]
    masked = [replace(r, allowed=mask) for r, mask in zip(plain, masks, strict=True)]
    free, got = sample(logits.clone(), plain), sample(logits.clone(), masked)
    assert [got[0], got[3]] == [free[0], free[3]]
    assert got[1].token_id == 7
    assert got[2].token_id in {1, 40, 42}
    reference = torch.log_softmax(logits[1].double(), -1)
    assert got[1].logprobs is not None
    assert got[1].logprobs.chosen.logprob == pytest.approx(reference[7].item(), abs=1e-5)
    assert got[1].logprobs.top == (free[1].logprobs or got[0].logprobs).top  # type: ignore[union-attr]


def test_a_mask_that_allows_nothing_is_the_rows_own_error_and_bans_hold_under_it() -> None:
    logits = torch.randn(2, 16)
    nothing, one = row(SamplingParams(seed=1), allowed=bytes(2)), row(SamplingParams(seed=1), allowed=mask_of({3, 4}, 16), banned_ids=[3])
    empty, banned = sample(logits, [nothing, one])
    assert empty.unsatisfiable
    assert banned.token_id == 4


def test_a_short_mask_allows_nothing_behind_its_end() -> None:
    assert pick(torch.tensor([[0.0] * 20 + [9.0]]), [row(SamplingParams(temperature=0), allowed=b"\x04")]) == [2]


def test_scores_are_log_softmax() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    reference = torch.log_softmax(logits.double(), -1)
    for index, position in enumerate(score(logits, [3, 1, 4, 1, 5], 2)):
        assert position.chosen.logprob == pytest.approx(reference[index, [3, 1, 4, 1, 5][index]].item(), abs=1e-5)
        assert [t.token_id for t in position.top] == reference[index].topk(2).indices.tolist()
        assert position.has_logprob


@pytest.mark.parametrize("vocab", [1, 15, 16, 1024, 1025, 4999])
def test_peaks_are_the_first_of_the_greatest(vocab: int) -> None:
    logits = torch.randint(-30, 4, (40, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    logits[1] = float("-inf")
    logits[2, -1] = 9.0
    peaks = peaks_of(logits)
    greatest = logits.max(dim=-1).values
    assert torch.equal(peaks.logits, greatest)
    assert peaks.token_ids == [values.tolist().index(top) for values, top in zip(logits, greatest.tolist(), strict=True)]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1023, 1030])
def test_a_peak_isnt_finite_where_a_logit_isnt(odd: float, place: int) -> None:
    logits = torch.zeros(3, 1031)
    logits[1, place] = odd
    assert peaks_of(logits).logits.isfinite().tolist() == [True, False, True]


def test_no_rows_no_samples() -> None:
    assert sample(torch.empty(0, 10), []) == []


def test_the_kernels_choose_what_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real vocabulary, flat and steep, with every filter and none."""
    rng = random.Random(8)
    scale = torch.tensor([rng.choice([0.1, 1.0, 5.0]) for _ in range(300)]).unsqueeze(1)
    logits = torch.randn(300, 4999, generator=torch.Generator().manual_seed(8)) * scale
    rows = [
        row(
            SamplingParams(
                seed=rng.getrandbits(63),
                temperature=rng.choice([1e-9, 0.2, 1.0, 3.0, 50.0]),
                top_k=rng.choice([0, 0, 1, 7, 400, 4998, 5000]),
                top_p=rng.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999, 0.9999999]),
                min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 1.0]),
            ),
            banned_ids=rng.sample(range(4999), rng.choice([0, 3, 4998])),
        )
        for _ in range(300)
    ]
    natively = pick(logits, rows)
    monkeypatch.setattr("services.worker.engine.sampler.library.find", lambda: None)
    assert natively == pick(logits, rows)
