"""`forebay batch`: submits jobs over files of lines, and shows, cancels and reads them."""

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from forebay.v1 import batch_pb2, inference_pb2, inference_pb2_grpc
from services.cli import client
from services.cli.options import shown, text, whole
from services.cli.output import NOTHING, as_dict, print_json, when
from services.cli.problem import Problem, Usage
from services.cli.table import Column, print_table

_PIECE_BYTES = 256 << 10
_SECONDS = 30
_LOOK_SECONDS = 0.5
_OVER = ("failed", "completed", "expired", "cancelled")
Answer = TypeVar("Answer")
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Id = Annotated[str, typer.Argument(metavar="ID", parser=text("ID"), help="As `forebay batch submit` prints it.")]

app = typer.Typer(name="batch", rich_markup_mode=None)


@app.callback()
def batch() -> None:
    """Runs many requests as one job, as others leave room."""


@app.command()
def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", parser=text("FILE"), help="Lines as OpenAI's batch files have them; -: stdin.")],
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", parser=text("--endpoint"), help="What the lines call; left out: as the first line says.")
    ] = None,
    hours: Annotated[int, typer.Option("--hours", parser=whole("--hours", 1, 24), metavar="N", help="In which it is to be done.")] = 24,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", parser=text("--metadata"), metavar="NAME=TEXT", help="Words of your own.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", parser=text("--key"), help="Two jobs by one key are one; left out: by a key of this call.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job is over; exit code 1 unless it is completed.")] = False,
    as_json: Json = False,
) -> None:
    """Submits a job and prints its id."""
    with sys.stdin.buffer if file == "-" else Path(file).open("rb") as stream:
        first = stream.read(_PIECE_BYTES)
        header = inference_pb2.BatchHeader(
            endpoint=endpoint or _endpoint(first),
            window_hours=hours,
            metadata=dict(_pair(pair) for pair in metadata or ()),
            idempotency_key=key or secrets.token_hex(16),
            filename=Path(file).name if file != "-" else "",
        )
        made = _call(lambda stub, **options: _submit(stub, header, first, stream, options))
    found = made.batch
    if not as_json:
        print(found.batch_id, flush=True)
    if wait:
        found = _call(lambda stub, **options: _until_over(stub, found.batch_id, options))
    if as_json:
        print_json(as_dict(found))
    elif wait:
        print(_story(found), file=sys.stderr)
    if wait and _word(found) != "completed":
        raise Problem(f"the job {found.batch_id} is {_word(found)}", details=tuple(_faults(found)))


@app.command()
def status(
    batch_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", parser=text("ID"), help="One job; left out: the newest of your org.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows how a job stands, or the org's newest jobs."""
    if batch_id is None:
        listed = _call(lambda stub, **options: stub.ListBatches(inference_pb2.ListBatchesRequest(), **options))
        if as_json:
            print_json(as_dict(listed))
        elif listed.batches:
            print_table(_columns(listed.batches), Console())
        else:
            print("no jobs")
        return
    found = _call(lambda stub, **options: stub.GetBatch(inference_pb2.GetBatchRequest(batch_id=batch_id), **options)).batch
    if as_json:
        print_json(as_dict(found))
        return
    print_table(_columns([found]), Console())
    for line in _faults(found):
        print(line)


@app.command()
def cancel(batch_id: Id, as_json: Json = False) -> None:
    """Asks a job to end; lines without a result get one that says so."""
    answer = _call(lambda stub, **options: stub.CancelBatch(inference_pb2.CancelBatchRequest(batch_id=batch_id), **options))
    if as_json:
        print_json(as_dict(answer))
    else:
        print(_story(answer.batch))


@app.command()
def results(
    batch_id: Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further results until the job is over.")] = False,
) -> None:
    """Prints a job's results, a JSON object a line, in the order in which they came."""
    _call(lambda stub, **options: _print_results(stub, batch_id, follow, options))


def _call(work: Callable[..., Awaitable[Answer]]) -> Answer:
    """What the mesh says. Problem, in one line, where it refuses."""
    target = client.find()

    async def call() -> Answer:
        async with target.channel() as channel:
            return await work(inference_pb2_grpc.InferenceServiceStub(channel), metadata=target.metadata, timeout=_SECONDS)

    with client.friendly_errors(target):
        return asyncio.run(call())


async def _submit(
    stub: Any, header: inference_pb2.BatchHeader, first: bytes, stream: BinaryIO, options: dict[str, Any]
) -> inference_pb2.SubmitBatchResponse:
    async def pieces() -> AsyncIterator[inference_pb2.SubmitBatchRequest]:
        yield inference_pb2.SubmitBatchRequest(header=header)
        piece = first
        while piece:
            yield inference_pb2.SubmitBatchRequest(lines=piece)
            piece = await asyncio.to_thread(stream.read, _PIECE_BYTES)

    made: inference_pb2.SubmitBatchResponse = await stub.SubmitBatch(pieces(), metadata=options["metadata"])  # as long as it takes
    return made


async def _until_over(stub: Any, batch_id: str, options: dict[str, Any]) -> batch_pb2.Batch:
    while True:
        found: batch_pb2.Batch = (await stub.GetBatch(inference_pb2.GetBatchRequest(batch_id=batch_id), **options)).batch
        if _word(found) in _OVER:
            return found
        await asyncio.sleep(_LOOK_SECONDS)


async def _print_results(stub: Any, batch_id: str, follow: bool, options: dict[str, Any]) -> None:
    request = inference_pb2.StreamResultsRequest(batch_id=batch_id, follow=follow)
    async for answer in stub.StreamResults(request, metadata=options["metadata"]):
        if answer.HasField("result"):
            print(answer.result.json, flush=follow)


def _endpoint(first: bytes) -> str:
    """What the first line calls."""
    try:
        url = json.loads(first.partition(b"\n")[0])["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise Usage("the first line names no url: it must be a JSON object with custom_id, method, url and body, or pass --endpoint")
    return url


def _pair(given: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not separator:
        raise Usage(f"--metadata is {shown(given)}: it must be NAME=TEXT")
    return name, value


def _word(found: batch_pb2.Batch) -> str:
    return batch_pb2.BatchStatus.Name(found.status).removeprefix("BATCH_STATUS_").lower()


def _story(found: batch_pb2.Batch) -> str:
    return f"{found.batch_id} is {_word(found)}: {found.num_completed} of {found.num_lines} lines answered, {found.num_failed} failed"


def _faults(found: batch_pb2.Batch) -> list[str]:
    return [f"line {error.line}: {error.message}" if error.line else error.message for error in found.errors]


def _columns(found: Iterable[batch_pb2.Batch]) -> list[Column]:
    jobs = list(found)
    return [
        Column("id", [job.batch_id for job in jobs]),
        Column("status", [_word(job) + (f" (waits for {job.waiting_for})" if job.waiting_for else "") for job in jobs]),
        Column("lines", [f"{job.num_lines:,}" for job in jobs], rank=2),
        Column("answered", [f"{job.num_completed:,}" for job in jobs], rank=1),
        Column("failed", [f"{job.num_failed:,}" for job in jobs], rank=1),
        Column("endpoint", [escape(job.endpoint) for job in jobs], rank=4),
        Column("created", [when(job.created_at) for job in jobs], rank=3),
        Column("until", [when(job.expires_at) for job in jobs], rank=5),
        Column("output", [job.output_file_id or NOTHING for job in jobs], rank=6),
        Column("errors", [job.error_file_id or NOTHING for job in jobs], rank=7),
    ]
