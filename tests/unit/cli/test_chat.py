"""A chat: what it remembers, what it does with commands, refusals and odd lines."""

from collections.abc import Callable

import pytest

from forebay.v1 import inference_pb2
from services.cli import client
from services.cli.ask import Manner
from services.cli.chat import COMMANDS, chat
from tests.unit.cli.gateway import Gateway


def _typed(*lines: str | BaseException) -> Callable[[], str]:
    """What a terminal gives, line by line; then its end."""
    rest = iter((*lines, EOFError()))

    def read_line() -> str:
        line = next(rest)
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


def _chat(*lines: str | BaseException, manner: Manner | None = None) -> None:
    request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="system", content="Be brief.")])
    chat(client.find(), request, manner or Manner(), _typed(*lines))


def _said(gateway: Gateway) -> list[list[str]]:
    return [[message.content for message in request.messages[1:]] for request in gateway.asked]


def test_it_remembers_until_it_is_told_to_forget(gateway: Gateway) -> None:
    _chat("one", " ", "two", "/clear", "three")
    assert _said(gateway) == [["one"], ["one", "Paris", "two"], ["three"]]


def test_it_goes_on_after_a_refusal(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    _chat("one", "refuse", "break", "two")
    assert _said(gateway)[-1] == ["one", "Paris", "two"]
    out, err = capsys.readouterr()
    assert err == "forebay: INVALID_ARGUMENT: no\nforebay: DEADLINE_EXCEEDED: too late\n"
    assert "Once upon\nParis\n" in out, "the error starts on a line of its own"


def test_commands_are_never_sent(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    _chat("/help", "/bye now", "/etc/hosts is a file", "/exit", "never")
    assert _said(gateway) == [["/etc/hosts is a file"]]
    out = capsys.readouterr().out
    for command, meaning in COMMANDS.items():
        assert f"{command:8}{meaning}" in out
    assert "there is no /bye; the commands are /clear, /help, /exit" in out


def test_a_line_that_is_no_text_is_refused_and_the_chat_goes_on(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    _chat("\udcff", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "one")
    assert _said(gateway) == [["one"]]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "forebay: the line isn't UTF-8 (byte 0xff at position 0): convert it, with iconv say"
    assert second == "forebay: the line isn't in the terminal's encoding"


def test_ctrl_c_at_the_prompt_leaves(gateway: Gateway) -> None:
    _chat("one", KeyboardInterrupt(), "never")
    assert _said(gateway) == [["one"]]


def test_facts_follow_each_answer_where_wanted(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    _chat("one", manner=Manner(verbose=True))
    assert "seed 9" in capsys.readouterr().err
