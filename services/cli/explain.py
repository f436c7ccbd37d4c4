"""`forebay explain`: where one request's time went, as bars in time, with what happened on its workers and why it went there."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from forebay.v1 import admin_pb2, explain_pb2, types_pb2
from services.cli import admin
from services.cli.options import text
from services.cli.output import NOTHING, as_dict, class_word, print_json
from services.cli.table import Column, print_table

_BAR_WIDTH = 40
_WHY_IT_WAITED = {
    "room": "no worker had room",
    "share": "its org's leases filled the org's share of the caches",
    "kept": "what was free was kept for a request before it",
    "excluded": "its gateway could not reach the workers",
    "unserved": "no worker could hold it",
}
_REFUSALS = _WHY_IT_WAITED | {
    "room": "no room",
    "share": "the org's share is full",
    "kept": "kept for another",
    "excluded": "not reachable",
    "unserved": "another model",
    "too_small": "too small",
}


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", parser=text("ID"), help="Of an ended request: `forebay run -v` tells it.")],
    as_json: Annotated[bool, typer.Option("--json", help="The record as one JSON object.")] = False,
) -> None:
    """Shows where a request's time went.

    The id is x-forebay-request-id of an HTTP answer, or request_id of gRPC's Started. Records last an hour.
    """
    request = admin_pb2.ExplainRequest(request_id=request_id)
    record = admin.ask(lambda stub: stub.Explain, request, admin_pb2.ExplainResponse).explanation
    if as_json:
        print_json(as_dict(record))
        return
    screen = Console()
    for line in _head(record):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    print_table(_bars(record), screen)
    for attempt in record.attempts:
        for line in _story(attempt):
            screen.print(line, highlight=False, markup=False, soft_wrap=True)
        if attempt.decision.candidates:
            print_table(_candidates(attempt.decision), screen)


def _head(record: explain_pb2.Explanation) -> Iterator[str]:
    if record.status_code:
        end = f"failed with status {record.status_code}"
    else:
        end = types_pb2.FinishReason.Name(record.finish_reason).removeprefix("FINISH_REASON_").lower()
    first = f", first token after {record.ttft_seconds:.3f} s" if record.ttft_seconds else ""
    yield f"request {record.request_id} of {record.org}: {record.model}, {class_word(record.latency_class)}"
    usage = record.usage
    yield (
        f"{end} after {record.total_seconds:.3f} s{first}; {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} output tokens, {usage.preemptions} preemptions"
    )


def _bars(record: explain_pb2.Explanation) -> list[Column]:
    """A row per part: each begins where the one before it ends, though on a worker phases may have taken turns."""
    rows = [("admit", NOTHING, record.admit_seconds)]
    for attempt in record.attempts:
        rows += [
            (_word(explain_pb2.Phase.Name(part.phase), "PHASE_"), attempt.worker_id or NOTHING, part.seconds) for part in attempt.parts
        ]
    bars, begin, whole = [], 0.0, record.total_seconds or 1.0
    for _, _, seconds in rows:
        start, end = round(begin / whole * _BAR_WIDTH), round((begin + seconds) / whole * _BAR_WIDTH)
        bars.append(" " * start + ("█" * (end - start) or "▏"))
        begin += seconds
    return [
        Column("part", [name for name, _, _ in rows]),
        Column("worker", [escape(worker) for _, worker, _ in rows], rank=2),
        Column("seconds", [f"{seconds:.3f}" for _, _, seconds in rows]),
        Column("share", [f"{seconds / whole:.0%}" for _, _, seconds in rows], rank=1),
        Column("", bars, rank=3),
    ]


def _story(attempt: explain_pb2.Attempt) -> Iterator[str]:
    """What happened during an attempt, a line each."""
    yield f"attempt {attempt.epoch} on {attempt.worker_id}:" if attempt.epoch else "it ended in the queue:"
    if attempt.HasField("position"):
        yield f"  {attempt.position} before it in the queue"
    if attempt.decision.waited_for:
        yield f"  it waited, as {_WHY_IT_WAITED.get(attempt.decision.waited_for, attempt.decision.waited_for)}"
    for event in attempt.timeline.events:
        yield f"  {event.at_seconds:9.3f} s  {_event(event)}"
    if attempt.timeline.num_dropped_events:
        yield f"  {attempt.timeline.num_dropped_events} events are left out"
    if attempt.lost:
        yield f"  the worker was lost: {attempt.lost}"


def _event(event: explain_pb2.TimelineEvent) -> str:
    words = _word(explain_pb2.TimelineEventKind.Name(event.kind), "TIMELINE_EVENT_KIND_")
    words += f" of choice {event.choice_index}" if event.choice_index else ""
    words += f", {event.num_tokens} tokens" if event.num_tokens else ""
    words += f" in {event.num_chunks} chunks" if event.num_chunks > 1 else ""
    return words + (f", {event.num_cached_tokens} tokens cached" if event.num_cached_tokens else "")


def _candidates(decision: explain_pb2.Decision) -> list[Column]:
    """Who was looked at, with the terms of the cost, which count from the left."""
    shown = decision.candidates
    costs = [{term.name: term.value for term in candidate.cost} for candidate in shown]
    names = list(dict.fromkeys(term.name for candidate in shown for term in candidate.cost))
    left_out = decision.num_candidates - len(shown)
    return [
        Column("candidate", [escape(candidate.worker_id) for candidate in shown]),
        *(Column(name, [f"{cost[name]:g}" if name in cost else NOTHING for cost in costs], rank=1) for name in names),
        Column(
            f"outcome ({left_out} more)" if left_out else "outcome",
            ["chosen" if c.chosen else _REFUSALS.get(c.refused, c.refused) if c.refused else "costs more" for c in shown],
        ),
    ]


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", " ")
