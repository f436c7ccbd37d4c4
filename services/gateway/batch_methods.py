"""The gRPC face of jobs: InferenceService's methods for them. Lines pass through as they come."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from forebay.v1 import batch_pb2, inference_pb2, inference_pb2_grpc
from services.common.errors import Code, StatusError, invalid
from services.gateway.batches import MAX_PAGE, OVER, Jobs, check_endpoint, check_key, check_metadata, check_window
from services.gateway.gateway import Gateway
from services.gateway.interceptor import caller

_LOOK_SECONDS = 0.5  # for further results
_DEFAULT_PAGE = 20

Context = grpc.aio.ServicerContext[Any, Any]


class BatchMethods(inference_pb2_grpc.InferenceServiceServicer):
    """See inference.proto."""

    def __init__(self, gateway: Gateway) -> None:
        self._jobs = Jobs(gateway.mesh)
        self._batch_gateway = gateway
        self._reader_seconds = gateway.slow_reader_seconds

    async def SubmitBatch(self, pieces: AsyncIterator[inference_pb2.SubmitBatchRequest], _: Context) -> inference_pb2.SubmitBatchResponse:
        """See inference.proto."""
        first = await anext(pieces, None)
        if first is None or not first.HasField("header"):
            raise invalid("header", "the first message must be the header: it says what the lines call")
        header, window = first.header, f"{first.header.window_hours or 24}h"
        for check, value in ((check_endpoint, header.endpoint), (check_window, window), (check_metadata, header.metadata)):
            check(value)  # before anything is taken in
        check_key(header.idempotency_key)
        file_id, fingerprint = header.input_file_id, ""
        if not file_id:
            file_id, fingerprint = await self._take_lines(pieces, header.filename or "lines.jsonl")
        elif await anext(pieces, None) is not None:
            raise invalid("lines", "input_file_id names a file, so no lines may follow")
        batch = await self._jobs.create(
            caller().org,
            file_id,
            header.endpoint,
            window=window,
            metadata=dict(header.metadata),
            key=header.idempotency_key,
            fingerprint=fingerprint,
        )
        if fingerprint and batch.input_file_id != file_id:  # the key's job has a file of its own
            await self._jobs.delete_file(caller().org, file_id)
        self._batch_gateway.wake_runner()
        return inference_pb2.SubmitBatchResponse(batch=batch)

    async def _take_lines(self, pieces: AsyncIterator[inference_pb2.SubmitBatchRequest], filename: str) -> tuple[str, str]:
        upload = self._jobs.upload(caller().org)
        try:
            async for piece in pieces:
                if not piece.HasField("lines"):
                    raise invalid("header", "the header comes once: all further messages are lines")
                await upload.feed(piece.lines)
            await upload.end(filename, "batch")
        except (StatusError, asyncio.CancelledError):
            await upload.give_up()
            raise
        return upload.file_id, upload.fingerprint

    async def GetBatch(self, request: inference_pb2.GetBatchRequest, _: Context) -> inference_pb2.GetBatchResponse:
        """See inference.proto."""
        return inference_pb2.GetBatchResponse(batch=await self._jobs.batch(caller().org, request.batch_id))

    async def ListBatches(self, request: inference_pb2.ListBatchesRequest, _: Context) -> inference_pb2.ListBatchesResponse:
        """See inference.proto."""
        if not 0 <= request.limit <= MAX_PAGE:
            raise invalid("limit", f"limit is {request.limit}: it must be 1 to {MAX_PAGE}, or 0 for {_DEFAULT_PAGE}")
        listed = await self._jobs.batches(caller().org, request.after, request.limit or _DEFAULT_PAGE)
        return inference_pb2.ListBatchesResponse(batches=listed.batches, has_more=listed.has_more)

    async def CancelBatch(self, request: inference_pb2.CancelBatchRequest, _: Context) -> inference_pb2.CancelBatchResponse:
        """See inference.proto."""
        batch = await self._jobs.stop(caller().org, request.batch_id)
        self._batch_gateway.wake_runner()
        return inference_pb2.CancelBatchResponse(batch=batch)

    async def StreamResults(self, request: inference_pb2.StreamResultsRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        """See inference.proto."""
        cursor = request.cursor
        if cursor < 0:
            raise invalid("cursor", f"cursor is {cursor}: it must be one that StreamResults told, or 0")
        while True:
            read = await self._jobs.results(caller().org, request.batch_id, cursor)
            for number, result in enumerate(read.results, start=1):
                at = cursor + number if number < len(read.results) else read.next_cursor
                await self._write(context, inference_pb2.StreamResultsResponse(result=result, cursor=at))
            if read.next_cursor == cursor:
                if not request.follow or read.batch.status in OVER:
                    return await self._end(context, read.batch, cursor)
                await asyncio.sleep(_LOOK_SECONDS)
            cursor = read.next_cursor

    async def _end(self, context: Context, batch: batch_pb2.Batch, cursor: int) -> None:
        await self._write(context, inference_pb2.StreamResultsResponse(batch=batch, cursor=cursor))

    async def _write(self, context: Context, message: inference_pb2.StreamResultsResponse) -> None:
        try:
            async with asyncio.timeout(self._reader_seconds):
                await context.write(message)
        except TimeoutError:
            raise StatusError(Code.CANCELLED, f"nothing was read for {self._reader_seconds:g} s", reason="SLOW_READER") from None
        except grpc.aio.InternalError:  # how a write ends that the client's cancellation meets
            raise asyncio.CancelledError from None
