"""Whose step is next when several models share a device: stride scheduling by class. Pure: seconds are told, no clock is read.

Each model's account runs by the seconds that its steps took, divided by the weight of the most urgent class that it has work of (SPEC 5).
The lowest account is next, so a model with realtime work has ten times a standard one's time, and nobody starves (Waldspurger and
Weihl 1995). Who comes back from a rest starts at the lowest account of those who didn't rest: rest isn't saved up.
"""

from collections.abc import Mapping

WEIGHTS = {1: 10.0, 2: 1.0, 3: 0.1}
"""Realtime, standard, batch."""


class TimeSlice:
    """The accounts of all models of a device."""

    def __init__(self) -> None:
        self._accounts: dict[str, float] = {}
        self._classes: dict[str, int] = {}  # as they were when the account was looked at last
        self._floor = 0.0  # the account of whoever was chosen last

    def choose(self, wanting: Mapping[str, int]) -> str:
        """The model that steps next, of those that have work, each with its most urgent class (1 realtime .. 3 batch)."""
        for model, latency_class in wanting.items():
            # What it is ahead by is seconds that it had: in another class they weigh otherwise.
            ahead = max(0.0, self._accounts.get(model, 0.0) - self._floor)
            weight = WEIGHTS[self._classes.get(model, latency_class)]
            self._accounts[model] = self._floor + ahead * weight / WEIGHTS[latency_class]
            self._classes[model] = latency_class
        chosen = min(wanting, key=lambda model: (self._accounts[model], wanting[model]))
        self._floor = self._accounts[chosen]
        return chosen

    def charge(self, model: str, seconds: float) -> None:
        """The step that it was chosen for took so long."""
        self._accounts[model] += seconds / WEIGHTS[self._classes[model]]
