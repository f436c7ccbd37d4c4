"""`forebay run`: one answer, or a chat, over gRPC."""

import asyncio
import json
import sys
from typing import Annotated

import typer

from forebay.v1 import inference_pb2, types_pb2
from services.cli import client
from services.cli.ask import Answer, Manner, ask, end_line, print_end
from services.cli.chat import chat, terminal_line
from services.cli.options import choice, real, text, utf8, whole
from services.cli.problem import Problem, Usage

_CLASSES = {
    "realtime": types_pb2.LATENCY_CLASS_REALTIME,
    "standard": types_pb2.LATENCY_CLASS_STANDARD,
    "batch": types_pb2.LATENCY_CLASS_BATCH,
}
_MAX_TOKENS = 512
# Low, as small models ramble at the 1 that the API has for a default.
_TEMPERATURE = 0.2


def run(
    prompt: Annotated[str | None, typer.Argument(parser=text("the prompt"), metavar="PROMPT", hidden=True)] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", parser=text("--model"), metavar="NAME", help="From `forebay models`; may be left out where there is one."
        ),
    ] = "",
    system: Annotated[str | None, typer.Option(parser=text("--system"), metavar="TEXT", help="A system message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=whole("--max-tokens", 0, 2**31 - 1),
            metavar="N",
            help=f"Most tokens to generate; 0: no limit but the context.  [default: {_MAX_TOKENS}, or what the context has room for]",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(parser=real("--temperature", 0, 100), metavar="X", help="0 takes the likeliest token each time.")
    ] = _TEMPERATURE,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=whole("--seed", -(2**63), 2**63 - 1), metavar="N", help="The same seed gives the same answer; left out, one is drawn."
        ),
    ] = None,
    latency_class: Annotated[
        str | None,
        typer.Option(
            "--class", parser=choice("--class", tuple(_CLASSES)), metavar="CLASS", help="realtime, standard or batch; left out: the org's."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print the time to first token, the rate, ids and usage.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
) -> None:
    """Asks the mesh a question, or chats with it.

    Without PROMPT it chats at a terminal and reads the question from a pipe or file, as '-' does anywhere.
    """
    sampling = types_pb2.SamplingParams(temperature=temperature, max_tokens=max_tokens or None, seed=seed)
    request = inference_pb2.ChatRequest(
        model=model, sampling=sampling, latency_class=_CLASSES.get(latency_class or "", types_pb2.LATENCY_CLASS_UNSPECIFIED)
    )
    if system is not None:
        request.messages.add(role="system", content=system)
    manner = Manner(_MAX_TOKENS if max_tokens is None else 0, show=not as_json, verbose=verbose)
    target = client.find()
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        if as_json:
            raise Usage("--json needs a prompt: a chat is for people")
        chat(target, request, manner, terminal_line)
        return
    question = _standard_input() if prompt in (None, "-") else prompt
    if not question or not question.strip():
        raise Usage("the prompt is empty: say what to ask")
    request.messages.add(role="user", content=question)
    _once(target, request, manner)


def _standard_input() -> str:
    """All of it but its last line breaks, which are `echo`'s, not the question's: they change a small model's answer."""
    try:
        return utf8(sys.stdin.read() if sys.stdin is not None else "", "standard input").rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise Usage(
            f"standard input isn't {error.encoding.upper()} (byte 0x{byte:02x} at position {error.start}): convert it, with iconv say"
        ) from error


def _once(target: client.Target, request: inference_pb2.ChatRequest, manner: Manner) -> None:
    answer = Answer()
    try:
        with client.friendly_errors(target):
            asyncio.run(ask(target, request, answer, manner))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # behind the terminal's ^C
        raise
    except Problem:
        if manner.show:
            end_line(answer)
        raise
    if manner.show:
        print_end(request, answer, manner)
    else:
        print(json.dumps(answer.as_json(), ensure_ascii=False))
