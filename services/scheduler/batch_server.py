"""BatchService: protos in, protos out. What is kept and leased is decided in files.py, batches.py and their scripts."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from forebay.v1 import batch_pb2, batch_pb2_grpc
from services.common import errors
from services.common.errors import StatusError, invalid
from services.scheduler.batches import Batches, BatchInfo, Caller, Held
from services.scheduler.files import FileInfo, Files
from services.scheduler.wire import MAX_ID_LENGTH, check_id

MAX_LEASED = 4
"""With lines of up to a megabyte, an answer stays below gRPC's limit."""
MAX_RENEWED = 1000
MAX_RESULT_BYTES = 4 << 20
MAX_WINDOW_SECONDS = 86_400
_MAX_PAGE = 1000

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class BatchServicer(batch_pb2_grpc.BatchServiceServicer):
    """See batch.proto."""

    def __init__(self, files: Files, batches: Batches) -> None:
        self._files = files
        self._batches = batches

    async def PutFilePart(self, request: batch_pb2.PutFilePartRequest, context: Context) -> batch_pb2.PutFilePartResponse:
        """See batch.proto."""
        await _answer(self._put_part(request), context)
        return batch_pb2.PutFilePartResponse()

    async def _put_part(self, r: batch_pb2.PutFilePartRequest) -> None:
        check_id("org", r.org)
        check_id("file_id", r.file_id)
        await self._files.put_part(r.org, r.file_id, r.number, r.text, r.first_line)

    async def CloseFile(self, request: batch_pb2.CloseFileRequest, context: Context) -> batch_pb2.CloseFileResponse:
        """See batch.proto."""
        r = request
        info = await _answer(self._files.close(r.org, r.file_id, r.filename, r.purpose, r.num_parts, r.keep_seconds), context)
        return batch_pb2.CloseFileResponse(file=_file(info))

    async def ReadFile(self, request: batch_pb2.ReadFileRequest, context: Context) -> batch_pb2.ReadFileResponse:
        """See batch.proto."""
        return batch_pb2.ReadFileResponse(file=_file(await _answer(self._files.get(request.org, request.file_id), context)))

    async def ReadFiles(self, request: batch_pb2.ReadFilesRequest, context: Context) -> batch_pb2.ReadFilesResponse:
        """See batch.proto."""
        limit = min(max(1, request.limit), _MAX_PAGE)
        infos, more = await _answer(self._files.listed(request.org, request.after, limit, request.purpose), context)
        return batch_pb2.ReadFilesResponse(files=map(_file, infos), has_more=more)

    async def DeleteFile(self, request: batch_pb2.DeleteFileRequest, context: Context) -> batch_pb2.DeleteFileResponse:
        """See batch.proto."""
        await _answer(self._files.delete(request.org, request.file_id), context)
        return batch_pb2.DeleteFileResponse()

    async def ReadContent(self, request: batch_pb2.ReadContentRequest, context: Context) -> batch_pb2.ReadContentResponse:
        """See batch.proto."""
        text, following = await _answer(self._files.read(request.org, request.file_id, request.cursor), context)
        return batch_pb2.ReadContentResponse(text=text, next_cursor=following)

    async def CreateBatch(self, request: batch_pb2.CreateBatchRequest, context: Context) -> batch_pb2.CreateBatchResponse:
        """See batch.proto."""
        return batch_pb2.CreateBatchResponse(batch=_batch(await _answer(self._create(request), context)))

    async def _create(self, r: batch_pb2.CreateBatchRequest) -> BatchInfo:
        check_id("org", r.org)
        check_id("batch_id", r.batch_id)
        if not 0 < r.window_seconds <= MAX_WINDOW_SECONDS:
            raise invalid("window_seconds", f"window_seconds is {r.window_seconds}; it must be 1 to {MAX_WINDOW_SECONDS}")
        if len(r.idempotency_key) > MAX_ID_LENGTH:
            words = f"idempotency_key has {len(r.idempotency_key)} characters; it may have at most {MAX_ID_LENGTH}"
            raise invalid("idempotency_key", words)
        caller = Caller(r.org, r.idempotency_key, r.fingerprint)
        return await self._batches.create(caller, r.batch_id, r.input_file_id, r.endpoint, r.window_seconds, r.metadata)

    async def ReadBatch(self, request: batch_pb2.ReadBatchRequest, context: Context) -> batch_pb2.ReadBatchResponse:
        """See batch.proto."""
        return batch_pb2.ReadBatchResponse(batch=_batch(await _answer(self._batches.get(request.org, request.batch_id), context)))

    async def ReadBatches(self, request: batch_pb2.ReadBatchesRequest, context: Context) -> batch_pb2.ReadBatchesResponse:
        """See batch.proto."""
        limit = min(max(1, request.limit), _MAX_PAGE)
        infos, more = await _answer(self._batches.listed(request.org, request.after, limit), context)
        return batch_pb2.ReadBatchesResponse(batches=map(_batch, infos), has_more=more)

    async def StopBatch(self, request: batch_pb2.StopBatchRequest, context: Context) -> batch_pb2.StopBatchResponse:
        """See batch.proto."""
        return batch_pb2.StopBatchResponse(batch=_batch(await _answer(self._batches.stop(request.org, request.batch_id), context)))

    async def ReadResults(self, request: batch_pb2.ReadResultsRequest, context: Context) -> batch_pb2.ReadResultsResponse:
        """See batch.proto."""
        results, following, info = await _answer(self._batches.results(request.org, request.batch_id, max(0, request.cursor)), context)
        told = [batch_pb2.BatchResult(line=result.line + 1, json=result.json, failed=result.failed) for result in results]
        return batch_pb2.ReadResultsResponse(results=told, next_cursor=following, batch=_batch(info))

    async def LeaseLines(self, request: batch_pb2.LeaseLinesRequest, context: Context) -> batch_pb2.LeaseLinesResponse:
        """See batch.proto."""
        work = await _answer(self._batches.lease(min(max(1, request.most), MAX_LEASED)), context)
        lines = [
            batch_pb2.LeasedLine(
                lease=_lease(line.held),
                org=line.org,
                endpoint=line.endpoint,
                text=line.text,
                seconds_left=line.seconds_left,
                strikes=line.strikes,
                verdict=line.verdict,
            )
            for line in work.lines
        ]
        checks = [
            batch_pb2.LeasedCheck(
                batch_id=check.batch_id, org=check.org, input_file_id=check.input_file_id, endpoint=check.endpoint, epoch=check.epoch
            )
            for check in work.checks
        ]
        return batch_pb2.LeaseLinesResponse(lines=lines, checks=checks)

    async def RenewLines(self, request: batch_pb2.RenewLinesRequest, context: Context) -> batch_pb2.RenewLinesResponse:
        """See batch.proto."""
        lost = await _answer(self._batches.renew([_held(lease) for lease in request.leases[:MAX_RENEWED]]), context)
        return batch_pb2.RenewLinesResponse(lost=map(_lease, lost))

    async def CommitLine(self, request: batch_pb2.CommitLineRequest, context: Context) -> batch_pb2.CommitLineResponse:
        """See batch.proto."""
        kept = await _answer(self._commit(request), context)
        return batch_pb2.CommitLineResponse(kept=kept)

    async def _commit(self, r: batch_pb2.CommitLineRequest) -> bool:
        if len(r.json) > MAX_RESULT_BYTES or "\n" in r.json:
            raise invalid("json", f"json has {len(r.json)} characters; it must have at most {MAX_RESULT_BYTES} and no line break")
        return await self._batches.commit(_held(r.lease), r.json, failed=r.failed)

    async def ReturnLine(self, request: batch_pb2.ReturnLineRequest, context: Context) -> batch_pb2.ReturnLineResponse:
        """See batch.proto."""
        r = request
        await _answer(self._batches.give_back(_held(r.lease), r.delay_seconds, r.pause_seconds, strike=r.strike), context)
        return batch_pb2.ReturnLineResponse()

    async def StartBatch(self, request: batch_pb2.StartBatchRequest, context: Context) -> batch_pb2.StartBatchResponse:
        """See batch.proto."""
        wrong = [{"code": e.code, "message": e.message, "param": e.param, "line": e.line} for e in request.errors]
        await _answer(self._batches.start(request.batch_id, request.epoch, request.num_lines, wrong), context)
        return batch_pb2.StartBatchResponse()


async def _answer(work: Coroutine[Any, Any, Answer], context: Context) -> Answer:
    try:
        return await work
    except StatusError as error:
        await errors.abort(context, error)


def _held(lease: batch_pb2.LineLease) -> Held:
    return Held(lease.batch_id, lease.line, lease.epoch)


def _lease(held: Held) -> batch_pb2.LineLease:
    return batch_pb2.LineLease(batch_id=held.batch_id, line=held.line, epoch=held.epoch)


def _file(info: FileInfo) -> batch_pb2.StoredFile:
    return batch_pb2.StoredFile(
        file_id=info.file_id,
        filename=info.filename,
        purpose=info.purpose,
        num_bytes=info.num_bytes,
        created_at=info.created_at,
        expires_at=info.expires_at,
    )


def _batch(info: BatchInfo) -> batch_pb2.Batch:
    return batch_pb2.Batch(
        batch_id=info.batch_id,
        status=batch_pb2.BatchStatus.Value(f"BATCH_STATUS_{info.status.upper()}"),
        endpoint=info.endpoint,
        input_file_id=info.input_file_id,
        output_file_id=info.output_file_id,
        error_file_id=info.error_file_id,
        errors=[batch_pb2.BatchError(**error) for error in info.errors],
        num_lines=info.num_lines,
        num_completed=info.num_completed,
        num_failed=info.num_failed,
        window_seconds=info.window_seconds,
        created_at=info.created_at,
        expires_at=info.expires_at,
        metadata=info.metadata,
        waiting_for=info.waiting_for,
        **{f"{status}_at": at for status, at in info.times.items()},
    )
