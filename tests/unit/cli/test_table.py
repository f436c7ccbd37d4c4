"""Tables at any width: whole words, fewer columns."""

import io
import re

import pytest
from rich.console import Console

from services.cli.table import Column, print_table

COLUMNS = [
    Column("name", ["a-model-with-a-long-name"]),
    Column("slots", ["[green]1/32[/green]"], rank=1),
    Column("memory", ["4.6/23.5 GiB"], rank=3),
    Column("busy", ["50%"], rank=2),
]


def _printed(width: int, *, terminal: bool) -> list[list[str]]:
    out = io.StringIO()
    print_table(COLUMNS, Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return [re.split(r" {2,}", line.rstrip()) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("width", "titles"),
    [(80, ["name", "slots", "memory", "busy"]), (40, ["name", "slots", "busy"]), (32, ["name", "slots"]), (5, ["name"])],
)
def test_a_narrow_terminal_gets_fewer_columns(width: int, titles: list[str]) -> None:
    head, row = _printed(width, terminal=True)
    assert head == titles
    assert "a-model-with-a-long-name" in row


def test_a_pipe_gets_everything() -> None:
    head, row = _printed(5, terminal=False)
    assert head == ["name", "slots", "memory", "busy"]
    assert "4.6/23.5 GiB" in row
