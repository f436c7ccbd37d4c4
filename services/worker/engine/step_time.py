"""How long a step takes, as a line fitted to the steps so far: what one more token or draft costs. Pure; the engine brings the seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.engine.batch import Span

_MEMORY = 0.99  # weight of a step relative to the next one's
_RIDGE = 1e-3  # what steps don't tell apart is the fixed part, but for what earlier ones told: a first draft is for free, and tells
_REFIT = 4  # steps between fits
_MIN_STEPS = 4
_LEAST_SECONDS = 1e-9
_LEAST_MARGIN = 0.005  # of the fixed part: no draft is quite free
_ERROR_MEMORY = 0.99  # as _MEMORY: the error is that of the steps that the fit is made of


@dataclass(frozen=True)
class Load:
    """What a step has to do: tokens to compute, rows of logits to look at, keys to read (the lengths of the contexts), drafts to judge."""

    num_tokens: int
    num_rows: int
    num_keys: int
    has_drafts: bool = False

    @property
    def features(self) -> tuple[float, ...]:
        return 1.0, float(self.num_tokens), float(self.num_rows), float(self.num_keys), float(self.has_drafts)


def load_of(spans: Sequence[Span]) -> Load:
    """What a step with these spans has to do."""
    num_tokens = num_rows = num_keys = 0
    has_drafts = False
    for span in spans:
        num_tokens += span.length
        num_rows += len(span.scored) + len(span.sampled)
        num_keys += span.start + span.length
        has_drafts |= bool(span.draft.token_ids)
    return Load(num_tokens, num_rows, num_keys, has_drafts)


class StepTime:
    """Online least squares of seconds = fixed + per token + per row + per key + for drafts at all, each >= 0.

    Errors are relative: a stall hardly counts. The first draft of a step costs more than each further one where kernels like one row best.
    """

    def __init__(self) -> None:
        size = len(Load(0, 0, 0).features)
        self._products = [[0.0] * size for _ in range(size)]
        self._sums = [0.0] * size
        self._num_steps = 0
        self._coefficients: list[float] = [0.0] * size
        self._error = self._error_weight = 0.0

    @property
    def error(self) -> float:
        """Mean of |foretold - measured| / measured over the latest steps, each foretold before it was learnt from; 0 before the first."""
        return self._error / self._error_weight if self._error_weight else 0.0

    @property
    def known(self) -> bool:
        """False until enough steps were seen."""
        return self._num_steps >= _MIN_STEPS

    @property
    def line(self) -> tuple[float, float, float, float] | None:
        """Seconds of a step without drafts: fixed, per token, per row and per key. None until it is known."""
        fixed, per_token, per_row, per_key, _ = self._coefficients
        return (fixed, per_token, per_row, per_key) if self.known else None

    def record(self, load: Load, seconds: float) -> None:
        """A step that has been."""
        if seconds <= 0:
            return
        if self.known:
            self._error = _ERROR_MEMORY * self._error + abs(self.seconds(load) / seconds - 1)
            self._error_weight = _ERROR_MEMORY * self._error_weight + 1
        scaled = [feature / seconds for feature in load.features]  # the line shall come to 1 for it
        self._sums = [_MEMORY * total + value for total, value in zip(self._sums, scaled, strict=True)]
        self._products = [
            [_MEMORY * total + value * other for total, other in zip(row, scaled, strict=True)]
            for row, value in zip(self._products, scaled, strict=True)
        ]
        self._num_steps += 1
        if self._num_steps % _REFIT == 0:
            self._coefficients = self._fit()

    def seconds(self, load: Load) -> float:
        """What a step with this load should take; more than 0, so that rates can be formed of it."""
        fixed, per_token, per_row, per_key, drafting = self._coefficients
        seconds = fixed + per_token * load.num_tokens + per_row * load.num_rows + per_key * load.num_keys + drafting * load.has_drafts
        return max(seconds, _LEAST_SECONDS)

    def token_seconds(self) -> float:
        """What one more token of a prompt adds to a step, its key included."""
        return self._coefficients[1] + self._coefficients[3]

    def draft_seconds(self) -> float:
        """What one more draft adds to a step: a token, a row and a key."""
        return max(sum(self._coefficients[1:4]), _LEAST_MARGIN * self._coefficients[0])

    def drafting_seconds(self) -> float:
        """What a step with drafts takes beyond them."""
        return self._coefficients[4]

    def _fit(self) -> list[float]:
        """Drops whatever would come out negative, the worst first."""
        used = list(range(len(self._sums)))
        while True:
            matrix = [[self._products[i][j] * (1 + _RIDGE * (i == j != 0)) for j in used] for i in used]
            right = [self._sums[i] + _RIDGE * (i != 0) * self._products[i][i] * self._coefficients[i] for i in used]
            found = dict(zip(used, solve(matrix, right), strict=True))
            worst = min(used, key=lambda i: found[i])
            if found[worst] >= 0 or len(used) == 1:
                return [found.get(i, 0.0) for i in range(len(self._sums))]
            used.remove(worst)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with matrix x = right, for a symmetric positive definite matrix: Gauss without pivots. A dependent row yields 0."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        if rows[i][i] <= 1e-12 * matrix[i][i]:
            rows[i] = [float(j == i) for j in range(size)] + [0.0]
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))) / rows[i][i]
    return solution
