"""Since when a process has heard what there was to hear. Time is passed in."""


class Uptime:
    """A process that was stopped for a while (suspended, or starved) knows no more of the others than one that has just started."""

    def __init__(self, now: float, longest_gap_seconds: float) -> None:
        """It is asked again within the longest gap, as long as the process runs."""
        self._since = self._seen = now
        self._longest_gap_seconds = longest_gap_seconds

    def since(self, now: float) -> float:
        """The start, or the end of the last gap."""
        if now - self._seen > self._longest_gap_seconds:
            self._since = now
        self._seen = now
        return self._since
