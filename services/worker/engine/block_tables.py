"""The blocks behind each sequence's tokens: taken, found again by their keys, shared, given back. Ints only.

Owns both tiers, the device's pool and the host's. Knows no step: who may have blocks, and at whose cost, is the batcher's.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.worker.engine.block_pool import BlockPool, CacheIdentity, extend_keys
from services.worker.engine.config import EngineConfig
from services.worker.engine.costs import Costs
from services.worker.engine.host_pool import HostPool
from services.worker.engine.request import EngineRequest
from services.worker.engine.sequence import RequestState, Sequence


@dataclass
class CacheCounters:
    """Since the start; they only grow."""

    prefix_query_tokens: int = 0  # prompt tokens looked up
    prefix_hit_tokens: int = 0
    host_query_tokens: int = 0  # prompt tokens that the device's cache didn't have
    host_hit_tokens: int = 0
    copied_out_blocks: int = 0
    copied_in_blocks: int = 0


class BlockTables:
    """Gives sequences their blocks. `costs` says whether those on the host are worth their copies."""

    def __init__(self, config: EngineConfig, costs: Costs, model_version: str, kv_format: str) -> None:
        self.counters = CacheCounters()
        self.host = HostPool(config.host_blocks, config.max_step_copies)
        self.pool = BlockPool(config.num_blocks, keep_cached=config.prefix_cache, on_evict=self.host.keep)
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
        keys = self._shareable_keys(sequence)
        hits = self.pool.lookup(keys)
        total = self.num_blocks(sequence.num_held_tokens)
        if total - len(hits) + self.pool.num_unreferenced(hits) + headroom > self.pool.num_available:
            return False
        self.pool.touch(hits)
        rest = keys[len(hits) :] if self._costs.copying_pays(self._config.block_size) else []
        self._count_hits(sequence, len(hits), self.host.count(rest))
        slots = self.host.take(rest)  # before the device evicts: what comes back isn't overwritten by what goes
        sequence.block_table = hits + self.pool.allocate(total - len(hits))
        sequence.num_computed_tokens = len(hits) * self._config.block_size
        self._fill(sequence, slots)
        return True

    def bring_back(self, sequence: Sequence) -> bool:
        """Lets the step copy in what the host has of the next blocks. True where it has more than that: the rest comes in later steps."""
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
        missing = max(0, self.num_blocks(sequence.num_tokens) - len(sequence.block_table))
        if missing > self.pool.num_available:
            return False
        sequence.block_table += self.pool.allocate(missing)
        return True

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

    def release(self, sequence: Sequence) -> None:
        """All its blocks. Those with a key stay cached while nobody needs them."""
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def settle(self) -> None:
        """The step is over, and with it its copies."""
        self.counters.copied_out_blocks += len(self.host.copies_out)
        self.counters.copied_in_blocks += len(self.host.copies_in)
        self.host.settle()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts what must hold between steps: blocks are referenced by running sequences alone, slots by nothing."""
        self.pool.check_integrity([sequence.block_table for sequence in running])
        self.host.check_integrity()
        assert not self.host.copies_out, "a step's copies outlive it"
        assert not self.host.copies_in, "a step's copies outlive it"
