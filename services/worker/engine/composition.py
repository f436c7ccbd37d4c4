"""B_t: in which order waiting sequences get room, and who gives way to them. Pure: the time is an argument.

Class order comes first: by weight alone a hundred small batch sequences would outweigh a large realtime one. Inside a class goes first
who was begun already, then the most weight per block, which doubles as it waits. Strict classes starve, so each keeps a floor: a share of
the room that nobody takes away, and its first sequence that has become due goes before everybody.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from operator import attrgetter

from services.worker.engine.sequence import Sequence

WEIGHTS = {1: 10.0, 2: 1.0, 3: 0.1}  # by latency class, per sequence
DOUBLING_SECONDS = 4.5  # a batch sequence outweighs a fresh realtime one after half a minute
FLOOR_PARTS = 16  # one of so many parts of slots, blocks and a step's tokens is each class's own while it has work
WINDOW = 64  # so many of each class, the first by arrival, compete: a longer queue costs no more time
_MOST_DOUBLINGS = 64


def weight(sequence: Sequence, now: float) -> float:
    """Its class's, doubled every DOUBLING_SECONDS that it has waited."""
    return WEIGHTS[sequence.latency_class] * 2 ** min(sequence.waited(now) / DOUBLING_SECONDS, _MOST_DOUBLINGS)


def is_due(sequence: Sequence, now: float) -> bool:
    """Whether it has waited so long that it outweighs a fresh realtime sequence."""
    return sequence.latency_class > min(WEIGHTS) and weight(sequence, now) >= max(WEIGHTS.values())


def lets_nobody_pass(sequence: Sequence, now: float) -> bool:
    """Whether smaller ones of its class, too, wait until there is room for it: it was begun, or has waited for a while."""
    return sequence.num_preemptions > 0 or sequence.waited(now) >= DOUBLING_SECONDS


@dataclass
class Share:
    """What a class holds of the engine, and wants of the next step."""

    slots: int = 0
    blocks: int = 0  # one that sequences share counts for each of them
    tokens: int = 0


@dataclass
class Shares:
    """What the classes hold, and the floor that each of them keeps."""

    floor: Share
    held: dict[int, Share] = field(default_factory=dict)  # by class

    @classmethod
    def of(cls, running: Iterable[Sequence], max_sequences: int, num_blocks: int) -> "Shares":
        """Of what runs now."""
        shares = cls(Share(max_sequences // FLOOR_PARTS, num_blocks // FLOOR_PARTS))
        for sequence in running:
            shares.add(sequence)
        return shares

    def add(self, sequence: Sequence, sign: int = 1) -> None:
        """Takes in what the sequence holds; with sign -1, what it gives up."""
        share = self.held.setdefault(sequence.latency_class, Share())
        share.slots += sign
        share.blocks += sign * len(sequence.block_table)
        share.tokens += sign * sequence.num_lacking_tokens

    def tokens_before(self, latency_class: int, num_tokens: int) -> int:
        """Of the next step's `num_tokens`, those that a newcomer has to leave to others: one to each of lower classes, at most a floor."""
        floor = num_tokens // FLOOR_PARTS
        return sum(share.tokens if held_by <= latency_class else min(share.slots, floor) for held_by, share in self.held.items())

    def within_floor(self, latency_class: int, slots: int = 0, blocks: int = 0) -> bool:
        """Whether the class holds no more than its floor, or wouldn't with so much more."""
        share = self.held.get(latency_class, Share())
        return share.slots + slots <= self.floor.slots and share.blocks + blocks <= self.floor.blocks


def in_order(
    waiting: Seq[Sequence], running: Seq[Sequence], shares: Shares, num_blocks: Callable[[Sequence], int], now: float
) -> tuple[list[Sequence], list[Sequence]]:
    """Who gets room first: those whose class is owed it, then the others. `waiting` by class and arrival; `num_blocks` they would hold."""
    classes = [_in_class(group, num_blocks, now) for group in _windows(waiting)]
    due_running = {sequence.latency_class for sequence in running if is_due(sequence, now)}
    owed = [group.pop(0) for group in classes[1:] if _is_owed(group[0], due_running, shares, num_blocks, now)]
    return owed, [sequence for group in classes for sequence in group]


def _windows(waiting: Seq[Sequence]) -> Iterator[list[Sequence]]:
    """The first of each class."""
    start = 0
    while start < len(waiting):
        end = bisect.bisect_right(waiting, waiting[start].latency_class, start, key=attrgetter("latency_class"))
        yield list(waiting[start : min(end, start + WINDOW)])
        start = end


def _in_class(group: Seq[Sequence], num_blocks: Callable[[Sequence], int], now: float) -> list[Sequence]:
    """Those begun by arrival, then by weight per block; equals by arrival."""
    return sorted(group, key=lambda s: (s.num_preemptions == 0, 0.0 if s.num_preemptions else -weight(s, now) / max(num_blocks(s), 1)))


def _is_owed(sequence: Sequence, due_running: set[int], shares: Shares, num_blocks: Callable[[Sequence], int], now: float) -> bool:
    """Whether it goes before higher classes: inside its class's floor, or because it is due, while no other of its class runs for that."""
    if shares.within_floor(sequence.latency_class, 1, num_blocks(sequence)):
        return True
    return is_due(sequence, now) and sequence.latency_class not in due_running


def victims(running: Seq[Sequence], latency_class: int, shares: Shares, now: float) -> list[Sequence]:
    """Who gives way to that class, in this order: strictly lower classes, the lowest and youngest first. `running` by class and arrival.

    Nobody who ends by itself soon, holds all that it will ever need, belongs to its class's floor, or was the first there to be due.
    """
    lower = [sequence for sequence in running if sequence.latency_class > latency_class]
    spared: dict[int, Sequence] = {}
    for sequence in lower:
        if is_due(sequence, now):
            spared.setdefault(sequence.latency_class, sequence)
    left = Shares(shares.floor, {held_by: replace(share) for held_by, share in shares.held.items()})
    chosen = []
    for sequence in reversed(lower):
        if sequence.is_reserved or sequence.is_about_to_finish or spared.get(sequence.latency_class) is sequence:
            continue
        if not left.within_floor(sequence.latency_class):
            left.add(sequence, -1)
            chosen.append(sequence)
    return chosen
