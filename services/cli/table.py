"""Tables that never cut a word: a terminal too narrow for all columns gets fewer of them, anything else gets them all."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """One column with its cells, in rich's markup. Of the columns that may go, the one with the highest `rank` goes first; 0 stays."""

    title: str
    cells: Sequence[str]
    rank: int = 0


def print_table(columns: Sequence[Column], console: Console) -> None:
    """Prints what fits into the console's width; into a pipe or file, everything. What can't be left out is never cut."""
    shown = list(columns)
    while console.is_terminal and _width(shown, console) > console.width and any(column.rank for column in shown):
        shown.remove(max(shown, key=lambda column: column.rank))
    console.width = max(console.width, _width(shown, console))  # else rich would squeeze the columns
    console.print(_table(shown), soft_wrap=True)


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.title, no_wrap=True, overflow="ignore")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _width(columns: Sequence[Column], console: Console) -> int:
    options = console.options.update(width=10_000)
    return Measurement.get(console, options, _table(columns)).maximum
