"""`forebay run`: one answer, or a chat, as it comes, over gRPC."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console

from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.cli import client
from services.cli.problem import Problem

_CLASSES = {
    "realtime": types_pb2.LATENCY_CLASS_REALTIME,
    "standard": types_pb2.LATENCY_CLASS_STANDARD,
    "batch": types_pb2.LATENCY_CLASS_BATCH,
}


@dataclass
class Answer:
    """One answer and what it took."""

    text: str = ""
    request_id: str = ""
    model: str = ""
    fingerprint: str = ""
    seed: int = 0
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    ttft_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: the tokens after the first, over the time after the first."""
        rest = self.usage.get("completion_tokens", 0) - 1
        seconds = self.total_seconds - self.ttft_seconds
        return rest / seconds if rest > 0 and seconds > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        """For programs; durations in seconds."""
        return {**self.__dict__, "tokens_per_second": round(self.tokens_per_second, 2)}


def run(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; '-' reads standard input. None: a chat.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="A name from `forebay models`; may be left out where there is one.")] = "",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    latency_class: Annotated[str, typer.Option("--class", help="realtime, standard or batch.")] = "standard",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print the time to first token, the rate, ids and usage.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
) -> None:
    """Asks a question, or chats, with the mesh that is up."""
    if latency_class not in _CLASSES:
        raise Problem(f"--class {latency_class}: it must be realtime, standard or batch")
    sampling = types_pb2.SamplingParams()
    for name, value in (("max_tokens", max_tokens), ("temperature", temperature), ("seed", seed)):
        if value is not None:
            setattr(sampling, name, value)
    request = inference_pb2.ChatRequest(model=model, sampling=sampling, latency_class=_CLASSES[latency_class])
    if system is not None:
        request.messages.add(role="system", content=system)
    target = client.find()
    if prompt is None and as_json:
        raise Problem("--json needs a prompt: a chat is for people")
    text = sys.stdin.read() if prompt == "-" else prompt
    with client.friendly_errors(target):
        asyncio.run(_chat(target, request, verbose) if text is None else _once(target, request, text, verbose, as_json))


async def ask(target: client.Target, request: inference_pb2.ChatRequest, *, show: bool) -> Answer:
    """Streams one answer; prints its text as it comes if `show`."""
    answer = Answer()
    start = time.perf_counter()
    async with target.channel() as channel:
        async for event in inference_pb2_grpc.InferenceServiceStub(channel).Chat(request, metadata=target.metadata):
            match event.WhichOneof("event"):
                case "started":
                    started = event.started
                    answer.request_id, answer.model = started.request_id, started.model
                    answer.fingerprint, answer.seed = started.system_fingerprint, started.seed
                case "delta":
                    if not answer.ttft_seconds and event.delta.token_ids:
                        answer.ttft_seconds = time.perf_counter() - start
                    answer.text += event.delta.text
                    if show:
                        print(event.delta.text, end="", flush=True)
                case "finished":
                    usage = event.finished.usage
                    answer.finish_reason = types_pb2.FinishReason.Name(event.finished.reasons[0]).removeprefix("FINISH_REASON_").lower()
                    answer.usage = {name.name: getattr(usage, name.name) for name in usage.DESCRIPTOR.fields}
    answer.total_seconds = time.perf_counter() - start
    return answer


async def _once(target: client.Target, request: inference_pb2.ChatRequest, text: str, verbose: bool, as_json: bool) -> None:
    request.messages.add(role="user", content=text)
    answer = await ask(target, request, show=not as_json)
    if as_json:
        print(json.dumps(answer.as_json(), ensure_ascii=False))
        return
    print()
    if verbose:
        _print_facts(answer)


async def _chat(target: client.Target, request: inference_pb2.ChatRequest, verbose: bool) -> None:
    screen = Console()
    screen.print("[dim]A chat. /clear forgets it, Ctrl-D ends it.[/dim]")
    first = len(request.messages)
    while True:
        try:
            text = screen.input("[bold cyan]> [/bold cyan]")
        except EOFError:
            screen.print()
            return
        if not text.strip():
            continue
        if text.strip() == "/clear":
            del request.messages[first:]
            continue
        request.messages.add(role="user", content=text)
        try:
            with client.friendly_errors(target):
                answer = await ask(target, request, show=True)
        except Problem as problem:  # the person may mend it with the next line
            print()
            print(f"forebay: {problem}", file=sys.stderr)
            del request.messages[-1]
            continue
        print()
        request.messages.add(role="assistant", content=answer.text)
        if verbose:
            _print_facts(answer)


def _print_facts(answer: Answer) -> None:
    usage = answer.usage
    rate = f"{answer.tokens_per_second:.1f} tokens/s" if answer.tokens_per_second else "one token"
    first = f"{answer.ttft_seconds * 1000:.0f} ms"
    lines = (
        f"time to first token {first}, {rate}, {answer.total_seconds:.2f} s in all, ended by {answer.finish_reason}",
        f"{usage['prompt_tokens']} prompt tokens ({usage['cached_tokens']} cached), {usage['completion_tokens']} generated",
        f"request {answer.request_id}, model {answer.model}, seed {answer.seed}, fingerprint {answer.fingerprint}",
    )
    Console(stderr=True).print("\n".join(lines), style="dim", highlight=False, markup=False)
