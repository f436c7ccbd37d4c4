"""Which worker has computed which beginnings of prompts, by what was sent there. Of a cache it knows the size: what is oldest goes first.

A worker is known by its incarnation, so that a restarted one has nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.policy.order import Ticket

MAX_HOLDERS = 1024
"""Incarnations that are remembered; the one that got nothing for longest is forgotten."""
DIGITS = 16
"""Of a block hash."""


@dataclass(frozen=True)
class Prefix:
    """A prompt's beginnings, looked up. Whoever has one has all that are shorter, so that a few looks find the longest."""

    hashes: Sequence[str] = ()
    hash_tokens: int = 0
    _held: dict[str, dict[str, None]] = field(default_factory=dict)
    _holders: dict[str, set[str]] = field(default_factory=dict)

    def tokens(self, incarnation: str) -> int:
        """Tokens of the prompt that it has."""
        held = self._held.get(incarnation)
        if not held or not self.hashes or self.hashes[0] not in held:
            return 0
        return self.hash_tokens * bisect_left(self.hashes, True, lo=1, key=lambda block_hash: block_hash not in held)

    def holders(self, most: int) -> list[str]:
        """As many incarnations that have much of it: those that have most first. They may have lost some of it, or have gone."""
        found: dict[str, None] = {}
        last = bisect_left(self.hashes, True, key=lambda block_hash: block_hash not in self._holders)
        while last > 0 and len(found) < most:
            for incarnation in sorted(self._holders[self.hashes[last - 1]] - found.keys())[: most - len(found)]:
                found[incarnation] = None
            # Halved, for who has a little less has as much as nothing else to offer.
            last //= 2
        return list(found)


class PrefixIndex:
    """Bounded by the caches of MAX_HOLDERS workers."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, None]] = {}  # incarnation -> its hashes; both the least recently used first
        self._holders: dict[str, set[str]] = {}  # hash -> incarnations

    def look_up(self, ticket: Ticket) -> Prefix:
        """Who has how much of its prompt."""
        if not ticket.block_hashes or not self._held:
            return NOTHING
        return Prefix(_hashes(ticket), ticket.hash_tokens, self._held, self._holders)

    def sent(self, ticket: Ticket, incarnation: str, cache_tokens: int) -> None:
        """The ticket goes there, where the cache holds so many tokens."""
        if not ticket.block_hashes:
            return
        held = self._held.pop(incarnation, {})
        self._held[incarnation] = held
        # From the end, so that a prompt's head is newer than its tail: without the head the tail is worthless.
        for block_hash in reversed(_hashes(ticket)):
            held.pop(block_hash, None)
            held[block_hash] = None
            self._holders.setdefault(block_hash, set()).add(incarnation)
        while len(held) * ticket.hash_tokens > cache_tokens:
            oldest = next(iter(held))
            del held[oldest]
            self._forget(oldest, incarnation)
        if len(self._held) > MAX_HOLDERS:
            gone = next(iter(self._held))
            for block_hash in self._held.pop(gone):
                self._forget(block_hash, gone)

    def _forget(self, block_hash: str, incarnation: str) -> None:
        holders = self._holders[block_hash]
        holders.discard(incarnation)
        if not holders:
            del self._holders[block_hash]


NOTHING = Prefix()


def _hashes(ticket: Ticket) -> list[str]:
    return [ticket.block_hashes[i : i + DIGITS] for i in range(0, len(ticket.block_hashes), DIGITS)]
