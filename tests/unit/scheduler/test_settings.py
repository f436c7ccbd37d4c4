"""Distances between regions: as they are written, what they cost, and what can't be read."""

import pytest
from pydantic import ValidationError

from services.scheduler.settings import FAR_SECONDS, SchedulerSettings


def test_distances_hold_both_ways_and_the_unknown_is_far() -> None:
    settings = SchedulerSettings(distances="eu/us=0.09, eu/asia=0.2")
    assert settings.distance("us", "eu") == settings.distance("eu", "us") == 0.09
    assert settings.distance("us", "asia") == FAR_SECONDS
    assert settings.distance("eu", "eu") == settings.distance("", "us") == settings.distance("us", "") == 0


@pytest.mark.parametrize("value", ["eu-us=0.1", "eu/us", "eu/us=fast", "eu/us=-1", "/us=0.1", "eu/us=60", "eu/us=nan"])
def test_what_is_no_distance_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValidationError, match=value):
        SchedulerSettings(distances=value)
