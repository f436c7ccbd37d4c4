"""A circuit breaker: after a failure, callers fail at once until a probe has succeeded. Time is passed in; knows no Redis."""


class Circuit:
    """Closed until a failure; then open, letting one probe through every `open_seconds`."""

    def __init__(self, open_seconds: float = 0.5) -> None:
        self.open_seconds = open_seconds
        self._next_probe: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last call has failed."""
        return self._next_probe is not None

    def admits(self, now: float) -> bool:
        """Whether a call may go through. While open this is true once per `open_seconds`: that caller is the probe."""
        if self._next_probe is None:
            return True
        if now < self._next_probe:
            return False
        self._next_probe = now + self.open_seconds
        return True

    def failed(self, now: float) -> None:
        """A call has failed."""
        self._next_probe = now + self.open_seconds

    def succeeded(self) -> None:
        """A call has succeeded."""
        self._next_probe = None
