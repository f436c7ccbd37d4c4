"""A chat on a terminal: line after line is asked with all that was said before."""

import asyncio
import importlib.util
import re
import sys
from collections.abc import Callable

from forebay.v1 import inference_pb2
from services.cli import client
from services.cli.ask import Answer, Manner, ask, end_line, print_end
from services.cli.options import utf8
from services.cli.problem import Problem

COMMANDS = {"/clear": "forgets what was said", "/help": "shows this", "/exit": "leaves, as Ctrl-D does"}
_COMMAND = re.compile(r"/[A-Za-z]+")
_PROMPT = "> "


def chat(target: client.Target, request: inference_pb2.ChatRequest, manner: Manner, read_line: Callable[[], str]) -> None:
    """Goes on until `read_line` raises EOFError or KeyboardInterrupt. `request` has the system message, and keeps the conversation."""
    print("A chat. /help shows its commands, Ctrl-C cuts an answer, Ctrl-D leaves.", flush=True)
    first = len(request.messages)
    with asyncio.Runner() as runner:
        while (text := _next(read_line)) is not None:
            match text.split()[0]:
                case "/exit":
                    return
                case "/clear":
                    del request.messages[first:]
                case "/help":
                    print(_help())
                case word if _COMMAND.fullmatch(word):
                    print(f"there is no {word}; the commands are {', '.join(COMMANDS)}")
                case _:
                    _answer(runner, target, request, manner, text)


def terminal_line() -> str:
    """A line typed at the terminal, with editing and history. Ctrl-C drops a line that is begun; KeyboardInterrupt where none is."""
    readline = importlib.import_module("readline") if importlib.util.find_spec("readline") else None
    while True:
        try:
            return input(_PROMPT)  # which edits by readline once that is imported
        except KeyboardInterrupt:
            print()
            if readline is None or not readline.get_line_buffer():
                raise


def _next(read_line: Callable[[], str]) -> str | None:
    """The next line that says something; None at the end."""
    while True:
        try:
            text = utf8(read_line(), "the line")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            return None
        except (Problem, UnicodeDecodeError) as problem:
            words = problem if isinstance(problem, Problem) else "the line isn't in the terminal's encoding"
            print(f"forebay: {words}", file=sys.stderr)
            continue
        if text.strip():
            return text


def _answer(runner: asyncio.Runner, target: client.Target, request: inference_pb2.ChatRequest, manner: Manner, text: str) -> None:
    """Asks and shows. What came of an answer that is cut stays part of the conversation; a question that got nothing doesn't."""
    request.messages.add(role="user", content=text)
    answer = Answer()
    try:
        with client.friendly_errors(target):
            runner.run(ask(target, request, answer, manner))
    except Problem as problem:  # the person may mend it with the next line
        end_line(answer)
        print(f"forebay: {problem}", file=sys.stderr)
        del request.messages[-1]
    except KeyboardInterrupt:
        print(flush=True)
        if answer.text:
            request.messages.add(role="assistant", content=answer.text)
        else:
            del request.messages[-1]
    else:
        print_end(request, answer, manner)
        request.messages.add(role="assistant", content=answer.text)


def _help() -> str:
    return "\n".join(f"{command:8}{meaning}" for command, meaning in COMMANDS.items())
