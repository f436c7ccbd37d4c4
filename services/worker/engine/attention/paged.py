"""The reference attention: plain torch over the paged cache, every row the same bits whatever else is in the step.

Queries are cut into tiles (some tokens of one sequence), equal tiles are stacked into groups, and a group walks the keys in fixed splits
of SPLIT tokens with an online softmax. A split that a row can't see changes nothing of that row, exactly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.attention.metadata import AttentionMetadata
from services.worker.engine.config import ModelConfig
from services.worker.engine.kv_cache import KVCache
from services.worker.engine.linear import BASE_ROWS, equal_row_sizes

SPLIT = 256  # keys per step of the softmax; part of what "reproducible" means, so never tuned per batch
_MAX_TILE_ROWS = 256  # query rows (tokens x heads of a group) per tile
_MAX_GROUP_BYTES = 8 << 20  # keys and values gathered at a time, so that they stay in the processor's cache
_LOWEST = -1e30  # below every score and yet finite: exp(_LOWEST - _LOWEST) is 1, not NaN

Read = Callable[[Tensor], Tensor]  # rows of the plan's unit -> fp32 [slots, head_dim]


@dataclass(frozen=True)
class Tile:
    """Some tokens of one sequence in this step."""

    sequence: int
    first_token: int  # in the step
    num_tokens: int
    context: int  # positions up to and with the last token of the tile


@dataclass(frozen=True)
class Split:
    """SPLIT positions of the first `num_tiles` tiles of a group."""

    num_tiles: int
    rows: Tensor  # [2 * num_tiles * num_kv_heads * rows per split] into the cache's rows of layer 0
    bias: Tensor | None  # [num_tiles, 1, num_rows, SPLIT]: 0 where a row sees a key, else -inf; None: every row sees all
    unwritten: Tensor | None  # slots among the gathered, [2 * num_tiles * num_kv_heads * SPLIT], that may hold anything, NaN too


@dataclass(frozen=True)
class Group:
    """Tiles with the same number of tokens, longest context first."""

    num_tokens: int  # of one tile
    tokens: Tensor | None  # [num_tiles * num_tokens] in the step; None: all of the step, in order
    num_rows: int  # of one tile and key/value head: num_tokens * group_size, filled up to a safe size
    splits: tuple[Split, ...]


@dataclass(frozen=True)
class Plan:
    """What all layers of a step share."""

    key_rows: Tensor  # [num_tokens * num_kv_heads] rows of head_dim in layer 0
    value_rows: Tensor
    unit: int  # tokens per gathered row
    groups: tuple[Group, ...]


class PagedAttention:
    """Writes a step's keys and values into the cache and attends to all of the context."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        self.config = config
        self.scale = config.head_dim**-0.5
        on_cpu = torch.device(device).type == "cpu"
        self.row_sizes = attention_row_sizes(config.head_dim, torch.get_num_threads()) if on_cpu else ()

    def plan(self, metadata: AttentionMetadata, kv: KVCache) -> Plan:
        """Turn a step's metadata into index tensors, once for all layers."""
        heads = torch.arange(self.config.num_kv_heads, device=kv.pages.device)
        key_rows = (metadata.slot_blocks[:, None] * kv.rows_per_block + heads * kv.block_size + metadata.slot_offsets[:, None]).flatten()
        value_rows = key_rows + self.config.num_kv_heads * kv.block_size
        unit = gcd(kv.unit, SPLIT)
        groups = tuple(self._group(tiles, metadata, kv, unit) for tiles in self._tiles(metadata))
        return Plan(key_rows, value_rows, unit, groups)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, kv: KVCache, plan: Plan) -> Tensor:
        """queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim] -> like queries."""
        head_dim = self.config.head_dim
        kv.write(layer, plan.key_rows, keys.reshape(-1, head_dim))
        kv.write(layer, plan.value_rows, values.reshape(-1, head_dim))
        read = partial(kv.read, layer, unit=plan.unit)
        queries = queries.float() * self.scale
        if plan.groups[0].tokens is None:
            return self._attend(queries, read, plan.groups[0]).to(keys.dtype)
        out = torch.empty_like(queries)
        for group in plan.groups:
            assert group.tokens is not None, "only a lone group is all of the step"
            out.index_copy_(0, group.tokens, self._attend(queries.index_select(0, group.tokens), read, group))
        return out.to(keys.dtype)

    def _attend(self, queries: Tensor, read: Read, group: Group) -> Tensor:
        """queries [num_tiles * num_tokens, num_heads, head_dim] -> like queries."""
        num_kv_heads, group_size, head_dim = self.config.num_kv_heads, self.config.group_size, self.config.head_dim
        used_rows = group.num_tokens * group_size
        q = queries.view(-1, group.num_tokens, num_kv_heads, group_size, head_dim).transpose(1, 2).reshape(-1, used_rows, head_dim)
        if group.num_rows > used_rows:
            q = F.pad(q, (0, 0, 0, group.num_rows - used_rows))
        first, *others = group.splits
        top, total, weighted = self._softmax(q, read, first, None)
        for split in others:
            active = slice(split.num_tiles * num_kv_heads)
            new_top, new_total, new_weighted = self._softmax(q[active], read, split, top[active])
            kept = (top[active] - new_top).exp_()
            top[active] = new_top
            total[active] = (total[active] * kept).add_(new_total)
            weighted[active] = (weighted[active] * kept).add_(new_weighted)
        out = weighted.div_(total)[:, :used_rows].view(-1, num_kv_heads, group.num_tokens, group_size, head_dim)
        return out.transpose(1, 2).reshape(queries.shape)

    def _softmax(self, q: Tensor, read: Read, split: Split, top: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """One split: (highest score so far, sum of exp(score - highest), that sum weighted by values), [rows.., 1 or head_dim]."""
        slots = read(split.rows)
        if split.unwritten is not None:
            slots.index_fill_(0, split.unwritten, 0)
        k, v = slots.view(2, -1, SPLIT, self.config.head_dim)
        scores = torch.bmm(q, k.transpose(1, 2))
        if split.bias is not None:
            scores.view(split.num_tiles, -1, *scores.shape[1:]).add_(split.bias)
        new_top = scores.amax(-1, keepdim=True)
        new_top = new_top.clamp_(min=_LOWEST) if top is None else torch.maximum(top, new_top)
        scores.sub_(new_top).exp_()
        return new_top, scores.sum(-1, keepdim=True), torch.bmm(scores, v)

    def _tiles(self, metadata: AttentionMetadata) -> Iterator[list[Tile]]:
        """The tiles of each group."""
        tile_tokens = max(1, _MAX_TILE_ROWS // self.config.group_size)
        tiles, first_token = [], 0
        for sequence, (query, context) in enumerate(zip(metadata.query_lengths, metadata.context_lengths, strict=True)):
            for start in range(0, query, tile_tokens):
                num_tokens = min(tile_tokens, query - start)
                tiles.append(Tile(sequence, first_token + start, num_tokens, context - query + start + num_tokens))
            first_token += query
        tiles.sort(key=lambda tile: (tile.num_tokens, -tile.context))
        split_bytes = 2 * self.config.num_kv_heads * SPLIT * self.config.head_dim * 4
        limit = max(1, _MAX_GROUP_BYTES // split_bytes)
        for _, same in groupby(tiles, key=lambda tile: tile.num_tokens):
            group = list(same)
            yield from (group[i : i + limit] for i in range(0, len(group), limit))

    def _group(self, tiles: list[Tile], metadata: AttentionMetadata, kv: KVCache, unit: int) -> Group:
        device = kv.pages.device
        num_tokens = tiles[0].num_tokens
        first_tokens = torch.tensor([tile.first_token for tile in tiles])
        tokens = (first_tokens[:, None] + torch.arange(num_tokens)).flatten()
        whole = torch.equal(tokens, torch.arange(sum(metadata.query_lengths)))
        used_rows = num_tokens * self.config.group_size
        num_rows = next((size for size in reversed(self.row_sizes) if size >= used_rows), used_rows)
        contexts = torch.tensor([tile.context for tile in tiles], device=device)
        tables = metadata.block_tables[torch.tensor([tile.sequence for tile in tiles], device=device)]
        row_tokens = torch.arange(num_rows, device=device).div(self.config.group_size, rounding_mode="floor").clamp(max=num_tokens - 1)
        positions = contexts[:, None] - num_tokens + row_tokens  # [num_tiles, num_rows]
        lowest = min(tile.context - num_tokens for tile in tiles)
        window = self.config.sliding_window
        first = 0 if window is None else max(0, lowest - window + 1) // SPLIT
        splits = []
        for index in range(first, -(-tiles[0].context // SPLIT)):
            count = sum(tile.context > index * SPLIT for tile in tiles)
            splits.append(self._split(index, count, lowest, positions[:count], contexts[:count], tables[:count], kv, unit))
        return Group(num_tokens, None if whole else tokens.to(device), num_rows, tuple(splits))

    def _split(
        self, index: int, num_tiles: int, lowest: int, positions: Tensor, contexts: Tensor, tables: Tensor, kv: KVCache, unit: int
    ) -> Split:
        """The split that starts at position index * SPLIT. `lowest` is the lowest position of any query row of the group."""
        config, device = self.config, kv.pages.device
        start = index * SPLIT
        starts = torch.arange(start, start + SPLIT, unit, device=device)  # [units]
        places = (starts // kv.block_size).clamp(max=tables.shape[1] - 1)
        per_head = kv.block_size // unit
        page = kv.rows_per_block // unit
        # Beyond the context any row will do, as it is masked: the sequence's first is its own and near.
        within = starts < contexts[:, None]  # [num_tiles, units]
        first_rows = torch.where(within, tables[:, places], tables[:, :1]) * page + torch.where(within, (starts % kv.block_size) // unit, 0)
        sides = torch.arange(2 * config.num_kv_heads, device=device).view(2, 1, -1, 1) * per_head
        rows = first_rows[None, :, None] + sides  # [2, num_tiles, num_kv_heads, units]
        bias, unwritten = None, None
        keys = torch.arange(start, start + SPLIT, device=device)
        if start + SPLIT > lowest + 1 or config.sliding_window is not None:
            hidden = keys > positions[:, :, None]
            if config.sliding_window is not None:
                hidden |= keys <= positions[:, :, None] - config.sliding_window
            bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[:, None]
        # Slots gathered beside a context's that hold anything at all: no value may come through a mask, as 0 * NaN is NaN.
        gathered = torch.where(within.repeat_interleave(unit, 1), keys, keys % unit)  # the position whose slot it is
        stale = gathered >= contexts[:, None]
        if bool(stale.any()):
            unwritten = stale[None, :, None].expand(2, -1, config.num_kv_heads, -1).flatten().nonzero().flatten()
        return Split(num_tiles, rows.flatten(), bias, unwritten)


@lru_cache
def attention_row_sizes(head_dim: int, num_threads: int) -> tuple[int, ...]:
    """The numbers of query rows, descending, that are safe for both products of attention with this number of threads."""
    assert num_threads == torch.get_num_threads()
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(1, SPLIT, head_dim, generator=generator)
    queries = torch.randn(512, head_dim, generator=generator)
    probabilities = torch.rand(512, SPLIT, generator=generator)
    for_scores = equal_row_sizes(lambda rows: torch.bmm(rows[None], keys.transpose(1, 2))[0], queries)
    for_values = equal_row_sizes(lambda rows: torch.bmm(rows[None], keys)[0], probabilities)
    return tuple(size for size in for_scores if size in for_values) or (BASE_ROWS,)
