"""What the engine must know of a grammar: which tokens may come next. How it is compiled and followed is its maker's."""

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """Where one choice stands in its grammar. The sequence keeps it through preemption; nothing in it ever raises."""

    @property
    def complete(self) -> bool:
        """The output is whole, and nothing could follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the grammar can't be followed any more, for the client. Then nothing is allowed."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes the next token of the output. One that isn't allowed is an error."""
        ...

    def masks(self, drafts: Sequence[int] = ()) -> list[bytes]:
        """The tokens allowed next, and behind each prefix of `drafts`: len(drafts) + 1 masks. The state stays where it is.

        In a mask, bit i % 8 of byte i // 8 stands for token i. Behind a draft that isn't allowed they mean nothing.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self) -> GrammarState:
        """A state of its own for a choice, before the first token."""
        ...


def state_behind(grammar: Grammar, token_ids: Sequence[int]) -> GrammarState:
    """A choice's state behind the output that it has already."""
    state = grammar.start()
    for token_id in token_ids:
        state.advance(token_id)
    return state
