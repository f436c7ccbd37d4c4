"""Who runs: waiting sequences get slots and blocks, in the order of `composition`; running ones grow, or give way. Pure, no clock.

Two preemptions: a more urgent class takes room from lower ones as soon as it comes, and a sequence that grows takes it from the youngest.
Either way the victim's blocks go, and what they held is swapped where that is cheaper than to compute it again.
"""

from dataclasses import dataclass
from enum import Enum

from services.worker.engine import composition
from services.worker.engine.block_tables import BlockTables
from services.worker.engine.composition import Shares
from services.worker.engine.config import EngineConfig
from services.worker.engine.sequence import Sequence, SequenceState
from services.worker.engine.sequence_queue import SequenceQueue
from services.worker.engine.timeline import Kind, Phase

MAX_MISSES = 8  # sequences that don't fit before a step stops trying


class Cause(Enum):
    """Whom a preempted sequence gave way to."""

    CLASS = 1  # a more urgent class
    CAPACITY = 2  # its own, so that an elder could grow


@dataclass
class PreemptionCounters:
    """Since the start; they only grow."""

    of_class: int = 0
    of_capacity: int = 0
    swapped: int = 0  # the others are computed again, but for what is still cached


@dataclass
class _Owed:
    """Room that was free when a class that is owed room didn't fit: it is for nobody else."""

    slots: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Want:
    """Those that run and can't grow, or else the first that waits, where it waits for blocks alone."""

    latency_class: int
    weight: float  # see composition
    waited_seconds: float
    num_blocks: int  # that it needs
    num_missing: int  # so many more must become available, as others need some of those that are


class Admission:
    """Moves sequences between waiting and running. `queue` and `tables` are the batcher's."""

    def __init__(self, config: EngineConfig, queue: SequenceQueue, tables: BlockTables) -> None:
        self.counters = PreemptionCounters()
        self._config = config
        self._queue = queue
        self._tables = tables

    def grow(self, now: float) -> None:
        """Sees to it that all that runs has blocks for all its tokens, at the cost of others or of itself."""
        for sequence in list(self._queue.running):
            while sequence.state is SequenceState.RUNNING and not self._tables.grow(sequence):
                victim = self._queue.next_victim(sequence)
                lower = victim.latency_class > sequence.latency_class
                self.preempt(victim, Cause.CLASS if lower else Cause.CAPACITY, now)

    def admit(self, num_tokens: int, now: float) -> None:
        """Starts waiting sequences while there is room, and more of the step's tokens than those before them want."""
        waiting, running = self._queue.waiting, self._queue.running
        if not waiting or (self._num_free_slots == 0 and waiting[0].latency_class >= running[-1].latency_class):
            return
        shares = Shares.of(running, self._config.max_sequences, self._config.num_blocks)
        owed, others = composition.in_order(waiting, running, shares, lambda s: self._tables.num_blocks(s.num_held_tokens), now)
        reserved = _Owed()
        for sequence in owed:
            if self._may_start(sequence, num_tokens, shares) and not self._start(sequence, shares, reserved, now):
                reserved = _Owed(self._num_free_slots, self._tables.pool.num_available)
        barred, num_misses = 4, 0  # this class and those below
        for sequence in others:
            if sequence.latency_class >= barred or self._prompt_is_under_way(sequence):
                continue  # where a prompt is computed, there will be more to share in the next step
            if not self._may_start(sequence, num_tokens, shares):
                barred = sequence.latency_class
            elif not self._start(sequence, shares, reserved, now):
                num_misses += 1
                passable = num_misses < MAX_MISSES and not composition.lets_nobody_pass(sequence, now)
                barred = sequence.latency_class + passable

    @property
    def _num_free_slots(self) -> int:
        return self._config.max_sequences - len(self._queue.running)

    def _may_start(self, sequence: Sequence, num_tokens: int, shares: Shares) -> bool:
        return shares.tokens_before(sequence.latency_class, num_tokens) < num_tokens

    def _prompt_is_under_way(self, sequence: Sequence) -> bool:
        """True while another choice of the request computes full blocks of the prompt that this one is going to share."""
        shared = (sequence.num_prompt_tokens - 1) // self._config.block_size * self._config.block_size
        return any(s.state is SequenceState.RUNNING and s.num_computed_tokens < shared for s in sequence.group.sequences)

    def _start(self, sequence: Sequence, shares: Shares, reserved: _Owed, now: float) -> bool:
        """Runs it, where it fits or lower classes can make room. False, and nobody has given way, where they can't."""
        if not self._fits(sequence, reserved):
            victims = self._victims(sequence, shares, now)
            headroom = reserved.blocks + self._headroom(sequence, len(victims))
            if not victims or not self._tables.would_admit(sequence, headroom, victims):
                return False
            for victim in victims:
                shares.add(victim, -1)
                self.preempt(victim, Cause.CLASS, now)
                if self._fits(sequence, reserved):
                    break
            else:
                return False
        self._queue.start(sequence, now)
        _tell_start(sequence, now)
        shares.add(sequence)
        return True

    def _victims(self, sequence: Sequence, shares: Shares, now: float) -> list[Sequence]:
        if not self._config.class_preemption:
            return []
        return composition.victims(self._queue.running, sequence.latency_class, shares, now)

    def _fits(self, sequence: Sequence, reserved: _Owed) -> bool:
        """Whether there was a slot and blocks; then it has the blocks."""
        return self._num_free_slots > reserved.slots and self._tables.admit(sequence, reserved.blocks + self._headroom(sequence))

    def _headroom(self, sequence: Sequence, num_leaving: int = 0) -> int:
        """A block for each that runs: otherwise the newcomer would be preempted as soon as they grow."""
        withheld = self._tables.pool.num_withheld
        if sequence.is_reserved:
            return withheld
        return withheld + max(0, self.num_growing - num_leaving)

    @property
    def num_growing(self) -> int:
        """Running sequences that may need a further block."""
        return sum(not sequence.is_reserved for sequence in self._queue.running)

    # --- where engines share a pool

    def want(self, now: float) -> Want | None:
        """What those that run, or the first that waits, lack. None: nothing, or it waits for a slot or for a prompt that is under way."""
        growing = [(sequence, count) for sequence in self._queue.running if (count := self._tables.num_missing(sequence)) > 0]
        num_growth = sum(count for _, count in growing)
        if num_growth > self._tables.pool.num_available:
            first = growing[0][0]
            num_missing = num_growth - self._tables.pool.num_available
            return Want(first.latency_class, composition.weight(first, now), 0.0, num_growth, num_missing)
        if not self._queue.waiting or self._num_free_slots == 0:
            return None
        first = self._queue.waiting[0]
        num_blocks = self._tables.num_needed(first) + (0 if first.is_reserved else self.num_growing)
        num_missing = num_blocks + self._tables.pool.num_withheld - self._tables.pool.num_available
        if num_missing <= 0 or self._prompt_is_under_way(first):
            return None
        return Want(first.latency_class, composition.weight(first, now), first.waited(now), num_blocks, num_missing)

    def num_yieldable(self, latency_class: int, now: float) -> int:
        """Blocks that sequences of classes below would free for a sequence of this class elsewhere, at most."""
        return self._tables.num_freed(self._yielding(latency_class, now))

    def give_way(self, num_blocks: int, latency_class: int, cause: Cause, now: float) -> int:
        """Preempts sequences below the class until so many blocks are free; how many came free."""
        before = self._tables.pool.num_used
        for victim in self._yielding(latency_class, now):
            if before - self._tables.pool.num_used >= num_blocks:
                break
            self.preempt(victim, cause, now)
        return before - self._tables.pool.num_used

    def _yielding(self, latency_class: int, now: float) -> list[Sequence]:
        running = self._queue.running
        return composition.victims(running, latency_class, Shares.of(running, self._config.max_sequences, self._config.num_blocks), now)

    def preempt(self, sequence: Sequence, cause: Cause, now: float) -> None:
        """Its full blocks stay cached while nobody needs them, so it may find them again; swapped, it finds all that it had."""
        num_computed_tokens, swapped = sequence.num_computed_tokens, self._tables.swap_out(sequence)
        self.counters.swapped += swapped
        self._tables.release(sequence)
        self._queue.preempt(sequence, now)
        if cause is Cause.CLASS:
            self.counters.of_class += 1
        else:
            self.counters.of_capacity += 1
        sequence.note(Kind.PREEMPTED_BY_CLASS if cause is Cause.CLASS else Kind.PREEMPTED_BY_CAPACITY, now)
        sequence.note(Kind.SWAPPED if swapped else Kind.RECOMPUTED, now, sequence.swap.num_tokens if sequence.swap else num_computed_tokens)
        sequence.enter(Phase.PREEMPTED, now)


def _tell_start(sequence: Sequence, now: float) -> None:
    """Behind its first token what a preemption lost is the preemption's price until it is there again; before it, it is prefill."""
    found = sequence.swap.num_tokens if sequence.swap else sequence.num_computed_tokens
    sequence.note(Kind.RESUMED if sequence.num_preemptions else Kind.ADMITTED, now, cached=found)
    if not sequence.has_yielded:
        sequence.enter(Phase.PREFILL, now)
