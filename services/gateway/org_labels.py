"""Which orgs have series of their own: a bounded number, those that the policy file names first. All others are "other"."""

from collections.abc import Callable, Iterable
from itertools import islice

OTHER = "other"


class OrgLabels:
    """A label for each org, the same for the life of the process once it has one of its own."""

    def __init__(self, most: int = 50, named: Callable[[], Iterable[str]] = tuple) -> None:
        """`named` gives the policy file's orgs as they are now."""
        self._most = most
        self._named = named
        self._shown: set[str] = set()

    def of(self, org: str) -> str:
        """The org's own name where there is room: for orgs that the file names, room is kept."""
        if org in self._shown:
            return org
        if len(self._shown) >= self._most:
            return OTHER
        named = set(islice(self._named(), self._most))
        if org not in named and len(self._shown | named) >= self._most:
            return OTHER
        self._shown.add(org)
        return org
