"""Which worker has computed which beginnings of prompts, by what was sent there. Of a cache it knows the size: what is oldest goes first.

A worker is known by its incarnation, so that a restarted one has nothing.
"""

from services.scheduler.policy.order import Ticket

MAX_HOLDERS = 1024
"""Incarnations that are remembered; the one that got nothing for longest is forgotten."""
DIGITS = 16
"""Of a block hash."""


class PrefixIndex:
    """Bounded by the caches of MAX_HOLDERS workers. Lookups cost the prompt's hashes, times the workers that hold each."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, None]] = {}  # incarnation -> its hashes; both the least recently used first
        self._holders: dict[str, set[str]] = {}  # hash -> incarnations

    def found(self, ticket: Ticket) -> dict[str, int]:
        """Incarnation -> prompt tokens that it has, of those that have any."""
        found: dict[str, int] = {}
        holders: set[str] | None = None
        for number, block_hash in enumerate(_hashes(ticket), 1):
            here = self._holders.get(block_hash, set())
            holders = here if holders is None else holders & here
            if not holders:
                break
            found.update(dict.fromkeys(holders, number * ticket.hash_tokens))
        return found

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


def _hashes(ticket: Ticket) -> list[str]:
    return [ticket.block_hashes[i : i + DIGITS] for i in range(0, len(ticket.block_hashes), DIGITS)]
