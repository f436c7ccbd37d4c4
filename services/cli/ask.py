"""One answer over gRPC, as it comes, and what it took."""

import sys
import time
from dataclasses import dataclass, field

import grpc
from rich.console import Console

from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.cli import client
from services.cli.output import class_word
from services.common.errors import from_rpc


@dataclass
class Answer:
    """One answer and what it took. Filled as it comes, so that what is there when it breaks off is there to keep."""

    text: str = ""
    request_id: str = ""
    model: str = ""
    fingerprint: str = ""
    seed: int = 0
    latency_class: str = ""
    lowered_from: str = ""  # the class that was asked for, where the org may not have it
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

    @property
    def stands_mid_line(self) -> bool:
        """Whether what is printed next would be glued to its text."""
        return bool(self.text) and not self.text.endswith("\n")

    def as_json(self) -> dict[str, object]:
        """For programs; durations in seconds."""
        return {**self.__dict__, "tokens_per_second": round(self.tokens_per_second, 2)}


@dataclass(frozen=True)
class Manner:
    """How `run` asks and shows. `default_max_tokens` holds where the request has no limit of its own; 0 is none."""

    default_max_tokens: int = 0
    show: bool = True
    verbose: bool = False


async def ask(target: client.Target, request: inference_pb2.ChatRequest, answer: Answer, manner: Manner) -> None:
    """Streams one answer into `answer`, and prints its text as it comes where the manner is to show it."""
    limited = inference_pb2.ChatRequest()
    limited.CopyFrom(request)
    if not manner.default_max_tokens or request.sampling.HasField("max_tokens"):
        await _stream(target, limited, answer, show=manner.show)
        return
    limited.sampling.max_tokens = manner.default_max_tokens
    try:
        await _stream(target, limited, answer, show=manner.show)
    except grpc.aio.AioRpcError as error:
        # Nobody asked for this limit: where the context has less room than that, the room is the limit.
        if not any(violation.field.endswith("max_tokens") for violation in from_rpc(error).violations):
            raise
        await _stream(target, request, answer, show=manner.show)


async def _stream(target: client.Target, request: inference_pb2.ChatRequest, answer: Answer, *, show: bool) -> None:
    start = time.perf_counter()
    thinking = False  # a thought is shown before the answer, and isn't part of it
    async with target.channel() as channel:
        async for event in inference_pb2_grpc.InferenceServiceStub(channel).Chat(request, metadata=target.metadata):
            match event.WhichOneof("event"):
                case "started":
                    started = event.started
                    answer.request_id, answer.model = started.request_id, started.model
                    answer.fingerprint, answer.seed = started.system_fingerprint, started.seed
                    answer.latency_class = class_word(started.latency_class)
                    answer.lowered_from = class_word(started.lowered_from) if started.lowered_from else ""
                case "delta":
                    if not answer.ttft_seconds and event.delta.token_ids:
                        answer.ttft_seconds = time.perf_counter() - start
                    gap = "\n\n" if thinking and event.delta.text else ""
                    thinking = bool(event.delta.reasoning) or (thinking and not event.delta.text)
                    answer.text += event.delta.text
                    if show:
                        print(event.delta.reasoning + gap + event.delta.text, end="", flush=True)
                case "finished":
                    usage = event.finished.usage
                    answer.finish_reason = types_pb2.FinishReason.Name(event.finished.reasons[0]).removeprefix("FINISH_REASON_").lower()
                    answer.usage = {name.name: getattr(usage, name.name) for name in usage.DESCRIPTOR.fields}
    answer.total_seconds = time.perf_counter() - start


def print_end(request: inference_pb2.ChatRequest, answer: Answer, manner: Manner) -> None:
    """What follows a whole answer: the end of its line, a word if a limit cut it that nobody asked for, facts if wanted (stderr)."""
    print(flush=True)
    notes = Console(stderr=True)
    if answer.finish_reason == "length" and not request.sampling.HasField("max_tokens") and manner.default_max_tokens:
        tokens = answer.usage["completion_tokens"]
        notes.print(f"(cut at {tokens} tokens: --max-tokens takes another limit, 0 for none)", style="dim", highlight=False, soft_wrap=True)
    if manner.verbose:
        notes.print(_facts(answer), style="dim", highlight=False, markup=False, soft_wrap=True)


def _facts(answer: Answer) -> str:
    usage = answer.usage
    ran = f"class {answer.latency_class}" + (f" (the org may not have {answer.lowered_from})" if answer.lowered_from else "")
    rate = f"{answer.tokens_per_second:.1f} tokens/s" if answer.tokens_per_second else "one token"
    first = f"{answer.ttft_seconds * 1000:.0f} ms"
    return "\n".join(
        (
            f"time to first token {first}, {rate}, {answer.total_seconds:.2f} s in all, ended by {answer.finish_reason}",
            f"{usage['prompt_tokens']} prompt tokens ({usage['cached_tokens']} cached), {usage['completion_tokens']} generated, {ran}",
            f"request {answer.request_id}, model {answer.model}, seed {answer.seed}, fingerprint {answer.fingerprint}",
        )
    )


def end_line(answer: Answer) -> None:
    """Whatever comes after a broken-off answer starts on a line of its own."""
    if answer.stands_mid_line:
        print(file=sys.stdout, flush=True)
