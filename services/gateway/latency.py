"""Latency classes: what clients call them, and which one a request gets of what it asks for and what its org was promised."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from forebay.v1 import types_pb2
from services.common.errors import invalid
from services.gateway.field import shown
from services.policy.classes import ClassPolicy

LatencyClass: TypeAlias = types_pb2.LatencyClass.ValueType
UNSPECIFIED = types_pb2.LATENCY_CLASS_UNSPECIFIED
REALTIME, STANDARD, BATCH = types_pb2.LATENCY_CLASS_REALTIME, types_pb2.LATENCY_CLASS_STANDARD, types_pb2.LATENCY_CLASS_BATCH

DEADLINE_SECONDS: Mapping[LatencyClass, float] = {REALTIME: 120.0, STANDARD: 600.0, BATCH: 86_400.0}
"""Of a request that names none, where the policy says nothing else."""
CLASSES: Mapping[str, LatencyClass] = {
    "realtime": REALTIME,
    "standard": STANDARD,
    "batch": BATCH,
    # OpenAI's service tiers
    "priority": REALTIME,
    "auto": UNSPECIFIED,
    "default": STANDARD,
    "flex": BATCH,
}
"""What clients call them."""


def latency_class(value: object, name: str = "class") -> LatencyClass:
    """A class from its words: realtime, standard, batch, or OpenAI's service tiers; null, "" and auto are unspecified."""
    if value is None or value == "":
        return UNSPECIFIED
    if not isinstance(value, str) or value not in CLASSES:
        raise invalid(name, f"{name} is {shown(value)}: it must be one of {', '.join(CLASSES)}")
    return CLASSES[value]


def deadlines(classes: Mapping[int, ClassPolicy]) -> Mapping[LatencyClass, float]:
    """Seconds that requests of each class have where they name none."""
    return {name: classes[name].deadline_seconds or seconds for name, seconds in DEADLINE_SECONDS.items()}


class Granted(NamedTuple):
    """The class that a request runs in; the one that it asked for where it was lowered, else unspecified."""

    latency_class: LatencyClass
    lowered_from: LatencyClass = UNSPECIFIED


def grant(asked: LatencyClass, policy: types_pb2.OrgPolicy, *, with_tools: bool = False) -> Granted:
    """The class that was asked for, else realtime for a chat with tools, else the org's default; none above the org's ceiling."""
    most = policy.ceiling_class or REALTIME
    if asked:
        return Granted(most, asked) if asked < most else Granted(asked)  # the more urgent, the lower its number
    if with_tools and most == REALTIME:
        return Granted(REALTIME)
    return Granted(max(policy.default_class or STANDARD, most))
