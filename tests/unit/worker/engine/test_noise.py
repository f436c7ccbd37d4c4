"""The noise of tokens: the right distribution, independent wherever it is drawn, and the same for ever."""

import math

import pytest
import torch

from services.worker.engine.noise import gumbel, noise_keys


def test_choices_seeds_and_positions_draw_independently() -> None:
    """Two neighbours in each coordinate agree as often as two independent draws do."""
    logits = torch.zeros(8)
    base = [noise_keys(seed, choice, position) for seed in range(10) for choice in range(10) for position in range(40)]
    keys = torch.tensor(base, dtype=torch.int32).t()
    tokens = (logits + gumbel(torch.arange(8, dtype=torch.int32), keys.unsqueeze(-1))).argmax(-1).view(10, 10, 40)
    for one, other in ((tokens[1:], tokens[:-1]), (tokens[:, 1:], tokens[:, :-1]), (tokens[:, :, 1:], tokens[:, :, :-1])):
        agree = (one == other).float().mean().item()
        assert abs(agree - 1 / 8) < 4 * math.sqrt(1 / 8 * 7 / 8 / one.numel())


def test_it_is_standard_gumbel_over_a_real_vocabulary() -> None:
    keys = torch.tensor([noise_keys(s, 0, 0) for s in range(8)], dtype=torch.int32).t()
    noise = gumbel(torch.arange(50_000, dtype=torch.int32), keys.unsqueeze(-1)).flatten().sort().values
    uniform = torch.exp(-torch.exp(-noise))
    ideal = (torch.arange(len(noise)) + 0.5) / len(noise)
    assert (uniform - ideal).abs().max() < 1.63 / math.sqrt(len(noise))  # Kolmogorov-Smirnov, p = .01


def test_it_is_what_it_was_when_it_was_written() -> None:
    """Seeded output must survive upgrades: these values may never change."""
    assert noise_keys(0, 0, 0) == (956087953, 595752380)
    assert noise_keys(-1, 3, 2) == (717519905, -490597411)
    keys = torch.tensor(noise_keys(1234, 2, 56), dtype=torch.int32)
    noise = gumbel(torch.tensor([0, 1, 777, 151_935], dtype=torch.int32), keys)
    assert noise.tolist() == pytest.approx([-0.23367580031877333, 1.5462582826129811, 0.17563725886374404, -0.2496141314408124], abs=1e-14)


def test_fp32_noise_is_near_enough_to_pick_contenders() -> None:
    keys = torch.tensor(noise_keys(5, 0, 0), dtype=torch.int32).unsqueeze(-1)
    ids = torch.arange(2_000_000, dtype=torch.int32)
    assert (gumbel(ids, keys, torch.float32).double() - gumbel(ids, keys)).abs().max() < 0.25


def test_noise_of_another_stream_is_other_noise_and_the_tokens_own_is_as_ever() -> None:
    assert len({noise_keys(1, 2, 3), noise_keys(1, 2, 3, 1), noise_keys(1, 2, 3, 2), noise_keys(1, 2, 4)}) == 4
    keys = torch.tensor([noise_keys(seed, 0, 0, stream) for seed in range(2000) for stream in (1, 2, 3)], dtype=torch.int32)
    assert len(keys.unique(dim=0)) == 6000
