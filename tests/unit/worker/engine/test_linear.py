"""Products whose rows keep their bits."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from services.worker.engine.linear import BASE_ROWS, Linear, cancelling_factors, cut_rows


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(48, 88), (576, 960), (1536, 576), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_keeps_its_bits_in_any_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype, num_threads: int, threads: Callable[[int], None]
) -> None:
    threads(num_threads)
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(1)  # other factors than the probe's
    x, weight = cancelling_factors(600, *shape, dtype, generator)
    linear = Linear(weight.t(), torch.zeros(shape[1]).to(dtype))
    alone = torch.cat([linear(row) for row in x[:40].split(1)])
    for count in [*range(1, 40), 64, 65, 100, 511, 600]:
        rows = torch.tensor([rng.randrange(40) for _ in range(count)])
        assert torch.equal(linear(x[rows]), alone[rows])


def test_the_product_is_right() -> None:
    weight, bias, x = torch.randn(30, 20), torch.randn(30), torch.randn(77, 20)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.t() + bias)
    assert Linear(weight)(x[:0]).shape == (0, 30)


def test_pieces_cover_the_rows_and_waste_little() -> None:
    sizes = (512, 64, 16, 4)
    assert cut_rows(0, sizes) == ()
    assert cut_rows(1, sizes) == (4,)
    assert cut_rows(7, sizes) == (16,)
    assert cut_rows(50, sizes) == (64,)
    for count in range(1, 1200):
        pieces = cut_rows(count, sizes)
        assert sum(pieces) - pieces[-1] < count <= sum(pieces)
        assert sum(pieces) < count + max(BASE_ROWS, count // 2 + 1)
