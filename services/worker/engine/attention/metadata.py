"""What one step attends to: where each token's keys and values go, and which blocks each sequence reads.

Built once per step from plain ints; holds no state between steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Sequences lie one after another in the flat token dimension of the step."""

    query_lengths: tuple[int, ...]  # tokens of each sequence in this step, >= 1
    context_lengths: tuple[int, ...]  # tokens of each sequence up to and with this step's
    block_tables: Tensor  # [num_sequences, max_blocks] int64, short rows filled with the sequence's own first block
    slot_blocks: Tensor  # [num_tokens] int64: the block of each token's keys and values
    slot_offsets: Tensor  # [num_tokens] int64: the place within that block

    @classmethod
    def build(
        cls,
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """Block tables may be longer than the context needs; only the blocks that the context reaches are read."""
        needed = [-(-context // block_size) for context in context_lengths]
        width = max(needed)
        tables, slots = [], []
        for query, context, table, count in zip(query_lengths, context_lengths, block_tables, needed, strict=True):
            assert 0 < query <= context, (query, context)
            assert len(table) >= count, (len(table), count)
            tables.append([*table[:count], *[table[0]] * (width - count)])
            slots += [(table[p // block_size], p % block_size) for p in range(context - query, context)]
        slot_tensor = torch.tensor(slots, dtype=torch.int64).t().contiguous().to(device)
        return cls(
            query_lengths=tuple(query_lengths),
            context_lengths=tuple(context_lengths),
            block_tables=torch.tensor(tables, dtype=torch.int64, device=device),
            slot_blocks=slot_tensor[0],
            slot_offsets=slot_tensor[1],
        )
