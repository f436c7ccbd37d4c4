"""Matrix products whose rows don't depend on their neighbours.

A CPU library picks its kernel by the number of rows, and with it the order of a sum. So rows are multiplied in pieces of a few sizes
that a probe has shown to give the same bits as BASE_ROWS rows do, on this machine, for this shape, with this number of threads.
Other devices multiply in one piece: batch invariance is promised on the CPU alone.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.quantization import Quantized, round_groups

BASE_ROWS = 16
ROW_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 2)
_PROBE_ELEMENTS = 4_000_000  # bounds the outputs of a probe, hence the largest piece for a wide matrix


class Linear:
    """x [num_rows, in] -> [num_rows, out]. The weight is kept transposed, [in, out]: there small pieces keep the bits of large ones."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None = None) -> None:
        """A Quantized weight is held in fp32, and each row is rounded as the kernels for integers round it."""
        self.rounded_width = weight.width if isinstance(weight, Quantized) else None
        if isinstance(weight, Quantized):
            weight = weight.dequantize()
        self.weight = weight.t().contiguous()
        self.bias = bias
        self.row_sizes = linear_row_sizes(*self.weight.shape, weight.dtype, torch.get_num_threads()) if weight.device.type == "cpu" else ()

    def __call__(self, x: Tensor) -> Tensor:
        if self.rounded_width:
            x = round_groups(x, self.rounded_width)
        x = x.contiguous()  # a transposed operand is another kernel
        product = self._in_pieces(x) if self.row_sizes else torch.mm(x, self.weight)
        return product if self.bias is None else product.add_(self.bias)

    def _in_pieces(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        pieces = cut_rows(num_rows, self.row_sizes)
        if pieces == (num_rows,):
            return torch.mm(x, self.weight)
        out = x.new_empty(num_rows, self.weight.shape[1])
        start = 0
        for size in pieces:
            piece = x[start : start + size]
            if len(piece) == size:
                torch.mm(piece, self.weight, out=out[start : start + size])
            else:
                out[start:] = torch.mm(F.pad(piece, (0, 0, 0, size - len(piece))), self.weight)[: len(piece)]
            start += size
        return out


@lru_cache(maxsize=4096)
def cut_rows(num_rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Piece sizes that cover num_rows; the last may reach beyond. `sizes` descend."""
    pieces, rest = [], num_rows
    while rest > 0:
        fitting = next((size for size in sizes if size <= rest), sizes[-1])
        covering = next((size for size in reversed(sizes) if size >= rest), fitting)
        # Padding is cheaper than one more pass over the weights, up to a point.
        size = covering if covering <= BASE_ROWS or 2 * covering <= 3 * rest else fitting
        pieces.append(size)
        rest -= size
    return tuple(pieces)


def padding(num_rows: int, sizes: tuple[int, ...]) -> int:
    """Rows to add so that pieces of these sizes come out whole. No sizes: none."""
    return sum(cut_rows(num_rows, sizes)) - num_rows if sizes else 0


@lru_cache
def linear_row_sizes(num_inputs: int, num_outputs: int, dtype: torch.dtype, num_threads: int) -> tuple[int, ...]:
    """The piece sizes, descending, that are safe for a matrix of this shape with this number of threads."""
    assert num_threads == torch.get_num_threads()
    generator = torch.Generator().manual_seed(num_inputs * 31 + num_outputs)
    num_rows = max(BASE_ROWS, min(ROW_SIZES[0], 1 << (_PROBE_ELEMENTS // num_outputs).bit_length() - 1))
    rows, weight = cancelling_factors(num_rows, num_inputs, num_outputs, dtype, generator)
    return equal_row_sizes(lambda piece: torch.mm(piece, weight), rows)


def cancelling_factors(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, in] and a weight [in, out] whose products cancel in pairs: what is left of a sum is the rounding of its order.

    On random data a short format hides most differences: of 30,000 bf16 sums in another order, all may round to the same.
    """
    half = num_inputs // 2
    order = torch.randperm(2 * half, generator=generator)
    weight, rows = torch.zeros(num_inputs, num_outputs), torch.zeros(num_rows, num_inputs)
    some_weight, some_rows = torch.randn(half, num_outputs, generator=generator), torch.randn(num_rows, half, generator=generator)
    weight[: 2 * half] = torch.cat([some_weight, -some_weight])[order]
    rows[:, : 2 * half] = torch.cat([some_rows, some_rows], dim=1)[:, order]
    return rows.to(dtype), weight.to(dtype)


def equal_row_sizes(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[int, ...]:
    """The sizes, descending, in which pieces of rows [num_rows, in] come out bit-equal to pieces of BASE_ROWS."""
    expected = torch.cat([multiply(piece) for piece in torch.split(rows, BASE_ROWS)])

    def equal(size: int) -> bool:
        count = max(size, min(2 * BASE_ROWS, len(rows)))
        return all(torch.equal(multiply(rows[i : i + size]), expected[i : i + size]) for i in range(0, count, size))

    return tuple(size for size in ROW_SIZES if size == BASE_ROWS or (size <= len(rows) and equal(size)))
