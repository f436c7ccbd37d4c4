"""`forebay run` as a person has it, at a terminal: what Ctrl-C and Ctrl-D end."""

import sys

import pytest

from tests.unit.cli.gateway import Gateway
from tests.unit.cli.terminal import CTRL_C, CTRL_D, Terminal

FOREBAY = (sys.executable, "-P", "-m", "services.cli")


def test_ctrl_c_cuts_the_answer_and_the_chat_goes_on(gateway: Gateway) -> None:
    with Terminal(*FOREBAY, "run") as terminal:
        terminal.expect("> ")
        terminal.keys("forever\n")
        terminal.expect("Once upon")
        terminal.keys(CTRL_C)
        terminal.expect("\n> ")
        assert gateway.cancelled.wait(10), "the worker must not go on"
        terminal.keys("and then?\n")
        terminal.expect("Paris\r\n> ")
        terminal.keys(CTRL_D)
        assert terminal.exit_code() == 0
    assert [message.content for message in gateway.asked[-1].messages] == ["forever", "Once upon", "and then?"]


def test_ctrl_c_at_the_prompt_drops_a_line_that_is_begun_and_else_leaves(gateway: Gateway) -> None:
    with Terminal(*FOREBAY, "run") as terminal:
        terminal.expect("> ")
        terminal.keys("half a line")
        terminal.expect("half a line")
        terminal.keys(CTRL_C)
        terminal.expect("> ")
        terminal.keys("whole\n")
        terminal.expect("Paris\r\n> ")
        terminal.keys(CTRL_C)
        assert terminal.exit_code() == 0
    assert [message.content for message in gateway.asked[-1].messages] == ["whole"]


def test_ctrl_c_ends_a_single_answer(gateway: Gateway) -> None:
    with Terminal(*FOREBAY, "run", "forever") as terminal:
        terminal.expect("Once upon")
        terminal.keys(CTRL_C)
        assert terminal.exit_code() == 130
        assert terminal.seen.endswith("^C\r\n"), "what comes next is on a line of its own"
        assert "Traceback" not in terminal.seen
    assert gateway.cancelled.wait(10)


@pytest.mark.parametrize("command", ["ps", "models"])
def test_tables_have_whole_names_at_a_terminal(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    with Terminal(*FOREBAY, command) as terminal:
        assert terminal.exit_code() == 0
        assert "tiny" in terminal.seen
        assert "…" not in terminal.seen
