"""What a decoder computes in one step: ints only. Sequences lie one after another in the flat token dimension."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A sequence's tokens are the last ones of its context."""

    tokens: Sequence[int]
    query_lengths: Sequence[int]  # tokens of each sequence in this step, >= 1
    context_lengths: Sequence[int]  # tokens of each sequence up to and with this step's
    block_tables: Sequence[Sequence[int]]  # may be longer than the context needs
    logit_rows: Sequence[int]  # tokens whose logits are wanted

    def positions(self) -> list[int]:
        """Of each token in its sequence."""
        both = zip(self.query_lengths, self.context_lengths, strict=True)
        return [position for length, context in both for position in range(context - length, context)]
