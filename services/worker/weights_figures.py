"""Where the models' weights are, as Prometheus asks for it. Without FOREBAY_DEVICE_MEMORY there is nothing to tell."""

from collections.abc import Callable, Iterator

from services.common.metrics import Figure, Rows
from services.worker.engine_figures import LABELS
from services.worker.sharing.residency import Place, Resident
from services.worker.sharing.weights import Weights

Read = Callable[[Resident], float]

_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("forebay_worker_weights_on_device", "1 where all the model's weights are on the device.", lambda r: float(r.place is Place.DEVICE)),
    ("forebay_worker_weights_bytes", "What the model's weights take.", lambda r: r.num_bytes),
    ("forebay_worker_weights_load_seconds", "What bringing the model to the device took the last time.", lambda r: r.load_seconds),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("forebay_worker_weights_loads", "Times that the model was brought to the device.", lambda r: r.num_loads),
    ("forebay_worker_weights_evictions", "Times that it gave way to another.", lambda r: r.num_evictions),
)


def figures(weights: Weights) -> Iterator[Figure]:
    """One for each name, with a series of every model."""
    for table, is_counter in ((_GAUGES, False), (_COUNTERS, True)):
        for name, text, read in table:
            yield Figure(name, text, _rows(weights, read), LABELS, counter=is_counter)
    yield Figure("forebay_worker_weights_budget_bytes", "Device memory for weights.", lambda: [((), weights.residency.budget)])


def _rows(weights: Weights, read: Read) -> Callable[[], Rows]:
    return lambda: [((model, "0"), read(resident)) for model, resident in weights.residency.residents.items()]
