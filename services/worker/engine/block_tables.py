"""The blocks behind each sequence's tokens: taken, found again by their keys, shared, given back. Ints only.

Owns both tiers, the device's pool and the host's. Knows no step: who may have blocks, and at whose cost, is the batcher's.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.worker.engine.block_pool import BlockPool, CacheIdentity, Pool, extend_keys
from services.worker.engine.config import EngineConfig
from services.worker.engine.costs import Costs
from services.worker.engine.host_pool import HostPool
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import RequestState, Sequence, Swap


@dataclass
class CacheCounters:
    """Since the start; they only grow."""

    prefix_query_tokens: int = 0  # prompt tokens looked up
    prefix_hit_tokens: int = 0
    host_query_tokens: int = 0  # prompt tokens that the device's cache didn't have
    host_hit_tokens: int = 0
    copied_out_blocks: int = 0
    copied_in_blocks: int = 0
    swapped_blocks: int = 0  # of preempted sequences, kept until they run again
    swapped_tokens: int = 0  # in those: not to be computed again


class BlockTables:
    """Gives sequences their blocks. `costs` says whether those on the host are worth their copies. `pool` None: one of its own."""

    def __init__(self, config: EngineConfig, costs: Costs, model_version: str, kv_format: str, pool: Pool | None = None) -> None:
        self.counters = CacheCounters()
        self.host = HostPool(config.host_blocks, config.max_step_copies, config.swap_blocks)
        self.pool: Pool = BlockPool(config.num_blocks, keep_cached=config.prefix_cache) if pool is None else pool
        self.pool.on_evict = self.host.keep
        self._config = config
        self._costs = costs
        self._model_version = model_version
        self._kv_format = kv_format

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self._config.block_size)

    def open(self, request: EngineRequest) -> RequestState:
        """The request with the keys of its prompt's full blocks, and no sequence yet."""
        # Without a prefix cache the choices of one request still share: the id takes the salt's place.
        salt = request.cache_salt if self._config.prefix_cache else request.request_id.encode()
        group = RequestState(request, CacheIdentity(salt, self._model_version, self._kv_format).root_key(), prompt_keys=[])
        extend_keys(group.prompt_keys, group.root_key, request.prompt_token_ids, self._config.block_size)
        return group

    # --- blocks come

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Blocks for all that it must hold, found ones first. False, and nothing taken, where that would leave less than `headroom`."""
        hits = self._hits(sequence)
        if self._num_taken(sequence, hits) + headroom > self.pool.num_available:
            return False
        self.pool.touch(hits.values())
        if sequence.swap is None:
            keys = self._shareable_keys(sequence)[len(hits) :]
            rest = keys if self._costs.copying_pays(self._config.block_size) else []
            self._count_hits(sequence, len(hits), self.host.count(rest))
            slots = self.host.take(rest)  # before the device evicts: what comes back isn't overwritten by what goes
            sequence.block_table = self._table(sequence, hits)
            sequence.num_computed_tokens = len(hits) * self._config.block_size
            self._fill(sequence, slots)
        else:
            sequence.block_table = self._table(sequence, hits)
            self._swap_in(sequence, sequence.swap)
        return True

    def would_admit(self, sequence: Sequence, headroom: int, victims: Iterable[Sequence]) -> bool:
        """Whether `admit` would succeed once the victims have given up their blocks."""
        hits = self._hits(sequence)
        num_freed = self.num_freed(victims, hits.values())
        return self._num_taken(sequence, hits) + headroom <= self.pool.num_available + num_freed

    def num_freed(self, victims: Iterable[Sequence], kept: Iterable[int] = ()) -> int:
        """Blocks that nobody references once the victims don't, without the `kept` ones."""
        names = Counter(block for victim in victims for block in victim.block_table)
        for block in kept:
            names.pop(block, None)
        return sum(count == self.pool.ref_count(block) for block, count in names.items())

    def num_needed(self, sequence: Sequence) -> int:
        """Available blocks that one that waits takes when it is admitted."""
        return self._num_taken(sequence, self._hits(sequence))

    def _hits(self, sequence: Sequence) -> dict[int, int]:
        """Blocks of the device that it can share, by index in its table: the first ones, or of one that was swapped any that it had."""
        if sequence.swap is None:
            return dict(enumerate(self.pool.lookup(self._shareable_keys(sequence))))
        found = ((index, self.pool.find(key)) for index, key in sequence.swap.keys.items())
        return {index: block for index, block in found if block is not None}

    def _num_taken(self, sequence: Sequence, hits: Mapping[int, int]) -> int:
        """How many fewer blocks are available once it has its own."""
        return self.num_blocks(sequence.num_held_tokens) - len(hits) + self.pool.num_unreferenced(hits.values())

    def _table(self, sequence: Sequence, hits: Mapping[int, int]) -> list[int]:
        """Found blocks at their places, new ones at all others."""
        total = self.num_blocks(sequence.num_held_tokens)
        fresh = iter(self.pool.allocate(total - len(hits)))
        return [hits[index] if index in hits else next(fresh) for index in range(total)]

    def bring_back(self, sequence: Sequence) -> bool:
        """Lets the step copy in what the host has of the next blocks. True where it has more than that: the rest comes in later steps."""
        if sequence.swap is not None:
            return not self._swap_in(sequence, sequence.swap)
        size = self._config.block_size
        if not self.host.num_held or sequence.num_computed_tokens % size or not self._costs.copying_pays(size):
            return False
        keys = self._shareable_keys(sequence)[sequence.num_computed_tokens // size :]
        slots = self.host.take(keys)
        self._fill(sequence, slots)
        return self.host.count(keys[len(slots) :]) > 0

    def _fill(self, sequence: Sequence, slots: Seq[int]) -> None:
        """The next of its blocks come from these slots."""
        start = sequence.num_computed_tokens // self._config.block_size
        blocks = sequence.block_table[start : start + len(slots)]
        self.host.copy_in(slots, blocks)
        for block, key in zip(blocks, sequence.block_keys[start:], strict=False):
            self.pool.register(block, key)  # whoever comes next in this step may share it: copies come before all spans
        sequence.num_computed_tokens += len(slots) * self._config.block_size

    def _swap_in(self, sequence: Sequence, swap: Swap) -> bool:
        """Goes on bringing back what was swapped, as much as the step may copy; the device may have some of it. True once all is back."""
        size = self._config.block_size
        for index in range(sequence.num_computed_tokens // size, self.num_blocks(swap.num_tokens)):
            block, key = sequence.block_table[index], swap.keys.get(index)
            if key is None or self.pool.find(key) != block:
                slot = swap.slots.get(index) if key is None else self.host.find(key)
                if slot is None:  # it became suspect meanwhile: from here on it is computed again
                    self.forget_swap(sequence)
                    return True
                if not self.host.num_copies_left:
                    return False
                self.host.read(slot, block)
                if key is not None:
                    self.pool.register(block, key)
            sequence.num_computed_tokens = min((index + 1) * size, swap.num_tokens)
        self.forget_swap(sequence)
        return True

    def _shareable_keys(self, sequence: Sequence) -> list[bytes]:
        """Of blocks that may be found. One token at least must be computed, and so must those whose log-probabilities are still wanted."""
        extend_keys(sequence.block_keys, sequence.group.root_key, sequence.tokens, self._config.block_size)
        limit = max(0, sequence.num_scored_tokens - 1) if sequence.needs_scoring else sequence.num_tokens - 1
        return sequence.block_keys[: limit // self._config.block_size]

    def _count_hits(self, sequence: Sequence, num_hits: int, num_host_hits: int) -> None:
        """A request's hits are those of its first choice, once: later ones find what the first has computed."""
        if sequence.group.num_cached_tokens is not None:
            return
        prompt_tokens, size = sequence.num_prompt_tokens, self._config.block_size
        on_device = min(num_hits * size, prompt_tokens)
        sequence.group.num_cached_tokens = min((num_hits + num_host_hits) * size, prompt_tokens)
        self.counters.prefix_query_tokens += prompt_tokens
        self.counters.prefix_hit_tokens += on_device
        if self.host.num_slots:
            self.counters.host_query_tokens += prompt_tokens - on_device
            self.counters.host_hit_tokens += sequence.group.num_cached_tokens - on_device

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for tokens that have come since. False, and nothing taken, where there are too few."""
        missing = self.num_missing(sequence)
        if missing > self.pool.num_available:
            return False
        sequence.block_table += self.pool.allocate(missing)
        return True

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that one that runs needs for the tokens that have come since it got its last."""
        return max(0, self.num_blocks(sequence.num_tokens) - len(sequence.block_table))

    def lend(self, sequence: Sequence, num_drafts: int, max_blocks: int) -> int:
        """Blocks for drafts, `max_blocks` at most, until they are taken back; how many drafts have slots then."""
        missing = self.num_blocks(sequence.num_tokens + num_drafts) - len(sequence.block_table)
        sequence.block_table += self.pool.allocate(max(0, min(missing, max_blocks)))
        return min(num_drafts, len(sequence.block_table) * self._config.block_size - sequence.num_tokens)

    # --- blocks go, and are found again

    def take_back(self, sequence: Sequence) -> None:
        """What was lent for drafts: to everybody else it is as if there had been none."""
        needed = self.num_blocks(sequence.num_held_tokens)
        self.pool.free(sequence.block_table[needed:])
        del sequence.block_table[needed:]

    def share(self, sequence: Sequence, start: int) -> None:
        """Lets others find the blocks that became full since `start` tokens were computed."""
        size = self._config.block_size
        extend_keys(sequence.block_keys, sequence.group.root_key, sequence.tokens, size)
        for index in range(start // size, sequence.num_computed_tokens // size):
            self.pool.register(sequence.block_table[index], sequence.block_keys[index])

    def distrust(self, sequence: Sequence) -> None:
        """Nobody finds its blocks any more, on either tier: their content is suspect."""
        self.pool.forget(sequence.block_table)
        self.host.forget(sequence.block_keys[: len(sequence.block_table)])

    def swap_out(self, sequence: Sequence) -> bool:
        """Keeps what it has computed, on the host as far as it must, until it runs again. False where computing it again is better.

        Blocks that others can find stay where they are until the device needs them; only private ones are copied at once.
        """
        if sequence.swap is not None:  # not all of it was back
            return True
        num_tokens, size = sequence.num_computed_tokens, self._config.block_size
        if self._config.recomputes_exactly and not self._costs.swapping_pays(size):
            self._costs.copy.doubt()
            return False
        blocks = dict(enumerate(sequence.block_table[: self.num_blocks(num_tokens)]))
        keys = {i: key for i, key in enumerate(sequence.block_keys[: num_tokens // size]) if self.pool.finds(blocks[i], key)}
        private = {index: block for index, block in blocks.items() if index not in keys}
        slots = self.host.promise(keys.values(), list(private.values())) if blocks else None
        if slots is None:
            return False
        sequence.swap = Swap(num_tokens, keys, dict(zip(private, slots, strict=True)))
        self.counters.swapped_blocks += len(blocks)
        self.counters.swapped_tokens += num_tokens
        return True

    def forget_swap(self, sequence: Sequence) -> None:
        """All of it is back, or nobody wants it any more."""
        if sequence.swap is not None:
            self.host.break_promise(sequence.swap.keys.values(), sequence.swap.slots.values())
            sequence.swap = None

    def release(self, sequence: Sequence) -> None:
        """All its blocks. Those with a key stay cached while nobody needs them."""
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def settle(self) -> None:
        """The step is over, and with it its copies."""
        self.counters.copied_out_blocks += len(self.host.copies_out)
        self.counters.copied_in_blocks += len(self.host.copies_in)
        self.host.settle()

    def check_integrity(self, live: Collection[Sequence]) -> None:
        """Asserts what must hold between steps: live sequences alone reference blocks, and slots by what was swapped."""
        self.pool.check_integrity([sequence.block_table for sequence in live])
        self.host.check_integrity([sequence.swap for sequence in live if sequence.swap is not None])
        assert not self.host.copies_out, "a step's copies outlive it"
        assert not self.host.copies_in, "a step's copies outlive it"
