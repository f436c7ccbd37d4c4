"""Which class a request gets: of what it asks for, whether it has tools, and what its org was promised."""

import pytest

from forebay.v1 import types_pb2
from services.common.errors import StatusError
from services.gateway.latency import BATCH, REALTIME, STANDARD, UNSPECIFIED, LatencyClass, grant, latency_class

Policy = types_pb2.OrgPolicy


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (None, 0), ("", 0), ("realtime", REALTIME), ("standard", STANDARD), ("batch", BATCH), ("priority", REALTIME), ("auto", UNSPECIFIED),
        ("default", STANDARD), ("flex", BATCH),
    ],
)  # fmt: skip
def test_classes(value: object, meaning: int) -> None:
    assert latency_class(value) == meaning


@pytest.mark.parametrize("value", ["Realtime", "urgent", 1, True, [], "x" * 1000, "a\nb"])
def test_unknown_classes(value: object) -> None:
    with pytest.raises(StatusError, match="realtime, standard, batch") as caught:
        latency_class(value, "service_tier")
    assert caught.value.violations[0].field == "service_tier"


@pytest.mark.parametrize(
    ("asked", "ceiling", "granted", "lowered_from"),
    [
        (REALTIME, UNSPECIFIED, REALTIME, UNSPECIFIED),
        (REALTIME, REALTIME, REALTIME, UNSPECIFIED),
        (REALTIME, STANDARD, STANDARD, REALTIME),
        (REALTIME, BATCH, BATCH, REALTIME),
        (STANDARD, BATCH, BATCH, STANDARD),
        (STANDARD, STANDARD, STANDARD, UNSPECIFIED),
        (BATCH, REALTIME, BATCH, UNSPECIFIED),
        (BATCH, BATCH, BATCH, UNSPECIFIED),
    ],
)
def test_the_ceiling_wins_and_says_so(
    asked: LatencyClass, ceiling: LatencyClass, granted: LatencyClass, lowered_from: LatencyClass
) -> None:
    for with_tools in (False, True):
        assert grant(asked, Policy(ceiling_class=ceiling, default_class=BATCH), with_tools=with_tools) == (granted, lowered_from)


@pytest.mark.parametrize(
    ("policy", "plain", "with_tools"),
    [
        (Policy(), STANDARD, REALTIME),
        (Policy(default_class=BATCH), BATCH, REALTIME),
        (Policy(default_class=REALTIME), REALTIME, REALTIME),
        (Policy(ceiling_class=STANDARD), STANDARD, STANDARD),
        (Policy(ceiling_class=BATCH), BATCH, BATCH),
        (Policy(default_class=BATCH, ceiling_class=STANDARD), BATCH, BATCH),
        (Policy(default_class=REALTIME, ceiling_class=BATCH), BATCH, BATCH),
    ],
)
def test_a_request_that_names_no_class_is_lowered_from_none(policy: Policy, plain: LatencyClass, with_tools: LatencyClass) -> None:
    assert grant(UNSPECIFIED, policy) == (plain, UNSPECIFIED)
    assert grant(UNSPECIFIED, policy, with_tools=True) == (with_tools, UNSPECIFIED)
