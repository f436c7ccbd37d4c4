"""What operators and schedulers want done with a model's weights: whether it can be, and what is said of it. Moves no bytes itself."""

from dataclasses import dataclass
from enum import Enum

from services.worker.sharing.residency import Place, Residency


class Kind(Enum):
    """The values are the wire's, see ModelActKind."""

    LOAD = 1
    UNLOAD = 2
    PIN = 3  # could it be? Who is pinned is told for all models at once
    UNPIN = 4
    PREFETCH = 5


@dataclass(frozen=True)
class Outcome:
    """`words` follow the model's name. `drop`: its device copy is to be given up now."""

    words: str
    refused: bool = False
    drop: bool = False


STAYS = "never leaves the device"


def obey(residency: Residency | None, kind: Kind, model: str, num_requests: int, now: float) -> Outcome:
    """What is to be done now, in the residency's own books. None, or a model that isn't in them: its weights stay where they are."""
    if residency is None or model not in residency.residents:
        return _of_one_that_stays(kind)
    resident = residency.residents[model]
    if resident.failure is not None and kind is not Kind.UNPIN:
        return Outcome(f"can't be served here: {resident.failure}", refused=True)
    if kind is Kind.PIN:
        reason = residency.why_not_pin(model)
        return Outcome(f"can't be pinned: {reason}", refused=True) if reason else Outcome("stays on the device")
    if kind is Kind.UNPIN:
        return _unpin(residency, model)
    if kind is Kind.UNLOAD:
        return _unload(residency, model, num_requests)
    if resident.place is Place.DEVICE:
        return Outcome("is on the device already")
    if resident.place is Place.HOST:
        residency.want(model, now, urgent=kind is Kind.LOAD)
    return Outcome("is coming to the device")


def _of_one_that_stays(kind: Kind) -> Outcome:
    if kind is Kind.UNLOAD:
        return Outcome(f"{STAYS}: only models that take turns in FOREBAY_DEVICE_MEMORY do", refused=True)
    return Outcome(STAYS)


def _unpin(residency: Residency, model: str) -> Outcome:
    if residency.residents[model].always_pinned:
        return Outcome("is pinned by the worker's own FOREBAY_PINNED_MODELS: take it out there", refused=True)
    return Outcome("gives way like others")


def _unload(residency: Residency, model: str, num_requests: int) -> Outcome:
    resident = residency.residents[model]
    if resident.pinned:
        who = "the worker's own FOREBAY_PINNED_MODELS" if resident.always_pinned else "an operator: unpin it first"
        return Outcome(f"is pinned by {who}", refused=True)
    if num_requests:
        requests = "a request" if num_requests == 1 else f"{num_requests} requests"
        return Outcome(f"is in use by {requests}: try again when they have ended", refused=True)
    if resident.place is Place.ARRIVING:
        return Outcome("is just coming: try again when it is there", refused=True)
    if resident.place is Place.HOST:
        residency.drop(model)
        return Outcome("is in host memory already")
    residency.drop(model)
    return Outcome("has left the device", drop=True)
