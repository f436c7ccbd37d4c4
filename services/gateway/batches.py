"""Files and jobs, kept by schedulers: what clients may ask of them, and what runners do. Knows no face's format."""

import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from forebay.v1 import batch_pb2, batch_pb2_grpc
from services.common.errors import StatusError, invalid
from services.gateway.batch_lines import ENDPOINTS, Part, Parts
from services.gateway.field import shown
from services.gateway.mesh import Mesh, Scheduler

PURPOSES = ("batch",)
MAX_PAGE = 100
_SECONDS = 5.0  # for an answer: a part is up to two megabytes
_MAX_METADATA, _MAX_METADATA_NAME, _MAX_METADATA_VALUE = 16, 64, 512
_MAX_KEY_CHARS = 256
_HOURS = re.compile(r"([1-9][0-9]?)h")
_MAX_HOURS = 24

Answer = TypeVar("Answer")
Status = batch_pb2.BatchStatus
OVER = frozenset((Status.BATCH_STATUS_FAILED, Status.BATCH_STATUS_COMPLETED, Status.BATCH_STATUS_EXPIRED, Status.BATCH_STATUS_CANCELLED))


class Upload:
    """One file on its way in, part by part: no more than a part of it is here at any time."""

    def __init__(self, jobs: "Jobs", org: str) -> None:
        self.file_id = f"file-{secrets.token_hex(12)}"
        self._jobs = jobs
        self._org = org
        self._parts = Parts()
        self._hash = hashlib.sha256()

    @property
    def fingerprint(self) -> str:
        """Hash of what has come."""
        return self._hash.hexdigest()

    async def feed(self, data: bytes) -> None:
        """More bytes. Raises INVALID_ARGUMENT for what is no text, RESOURCE_EXHAUSTED where it becomes too large."""
        self._hash.update(data)
        for part in self._parts.feed(data):
            await self._put(part)

    async def end(self, filename: str, purpose: str, keep_seconds: int = 0) -> batch_pb2.StoredFile:
        """All of it has come."""
        for part in self._parts.end():
            await self._put(part)
        request = batch_pb2.CloseFileRequest(
            org=self._org,
            file_id=self.file_id,
            filename=filename,
            purpose=purpose,
            num_parts=self._parts.num_parts,
            keep_seconds=keep_seconds,
        )
        return (await self._jobs.ask(lambda stub: stub.CloseFile(request, timeout=_SECONDS))).file

    async def give_up(self) -> None:
        """Takes away what has come. Where that can't be, it goes by itself in ten minutes."""
        try:
            await self._jobs.delete_file(self._org, self.file_id)
        except StatusError:
            return

    async def _put(self, part: Part) -> None:
        request = batch_pb2.PutFilePartRequest(
            org=self._org, file_id=self.file_id, number=part.number, text=part.text, first_line=part.first_line
        )
        await self._jobs.ask(lambda stub: stub.PutFilePart(request, timeout=_SECONDS))


class Jobs:
    """Asks any scheduler. Whatever is asked may be asked again, so one that has gone is no trouble."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def ask(self, question: Callable[["batch_pb2_grpc.BatchServiceAsyncStub"], Awaitable[Answer]]) -> Answer:
        """What a scheduler's BatchService says."""

        async def put(scheduler: Scheduler) -> Answer:
            return await question(scheduler.batches)

        return await self._mesh.ask(put)

    # -- for clients, whose org is that of their token

    def upload(self, org: str) -> Upload:
        """A file that is about to come."""
        return Upload(self, org)

    async def file(self, org: str, file_id: str) -> batch_pb2.StoredFile:
        """What is known of a file."""
        request = batch_pb2.ReadFileRequest(org=org, file_id=file_id)
        return (await self.ask(lambda stub: stub.ReadFile(request, timeout=_SECONDS))).file

    async def files(self, org: str, after: str, limit: int, purpose: str) -> batch_pb2.ReadFilesResponse:
        """The newest first."""
        request = batch_pb2.ReadFilesRequest(org=org, after=after, limit=limit, purpose=purpose)
        return await self.ask(lambda stub: stub.ReadFiles(request, timeout=_SECONDS))

    async def delete_file(self, org: str, file_id: str) -> None:
        """Takes it away."""
        request = batch_pb2.DeleteFileRequest(org=org, file_id=file_id)
        await self.ask(lambda stub: stub.DeleteFile(request, timeout=_SECONDS))

    async def content(self, org: str, file_id: str) -> AsyncIterator[str]:
        """A file in pieces of whole lines."""
        request, first = batch_pb2.ReadContentRequest(org=org, file_id=file_id), True
        while first or request.cursor:
            piece = await self.ask(lambda stub: stub.ReadContent(request, timeout=_SECONDS))
            request.cursor, first = piece.next_cursor, False
            yield piece.text

    async def create(
        self,
        org: str,
        input_file_id: str,
        endpoint: object,
        *,
        window: object = None,
        metadata: object = None,
        key: str = "",
        fingerprint: str = "",
    ) -> batch_pb2.Batch:
        """Begins a job. Two with the same key are one; `fingerprint` names the lines where another file may hold the same."""
        asked = [fingerprint or input_file_id, endpoint, window, metadata]
        request = batch_pb2.CreateBatchRequest(
            org=org,
            batch_id=f"batch_{secrets.token_hex(12)}",
            input_file_id=input_file_id,
            endpoint=check_endpoint(endpoint),
            window_seconds=check_window(window),
            metadata=check_metadata(metadata),
            idempotency_key=check_key(key),
            fingerprint=hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest(),
        )
        return (await self.ask(lambda stub: stub.CreateBatch(request, timeout=_SECONDS))).batch

    async def batch(self, org: str, batch_id: str) -> batch_pb2.Batch:
        """The job as it stands."""
        request = batch_pb2.ReadBatchRequest(org=org, batch_id=batch_id)
        return (await self.ask(lambda stub: stub.ReadBatch(request, timeout=_SECONDS))).batch

    async def batches(self, org: str, after: str, limit: int) -> batch_pb2.ReadBatchesResponse:
        """The newest first."""
        request = batch_pb2.ReadBatchesRequest(org=org, after=after, limit=limit)
        return await self.ask(lambda stub: stub.ReadBatches(request, timeout=_SECONDS))

    async def stop(self, org: str, batch_id: str) -> batch_pb2.Batch:
        """Asks a job to end."""
        request = batch_pb2.StopBatchRequest(org=org, batch_id=batch_id)
        return (await self.ask(lambda stub: stub.StopBatch(request, timeout=_SECONDS))).batch

    async def results(self, org: str, batch_id: str, cursor: int) -> batch_pb2.ReadResultsResponse:
        """Results behind the first `cursor` of them."""
        request = batch_pb2.ReadResultsRequest(org=org, batch_id=batch_id, cursor=cursor)
        return await self.ask(lambda stub: stub.ReadResults(request, timeout=_SECONDS))

    # -- for runners

    async def lease(self, most: int) -> batch_pb2.LeaseLinesResponse:
        """Work of any org."""
        request = batch_pb2.LeaseLinesRequest(most=most)
        return await self.ask(lambda stub: stub.LeaseLines(request, timeout=_SECONDS))

    async def renew(self, leases: Sequence[batch_pb2.LineLease]) -> Sequence[batch_pb2.LineLease]:
        """Those that are lost."""
        request = batch_pb2.RenewLinesRequest(leases=leases)
        return (await self.ask(lambda stub: stub.RenewLines(request, timeout=_SECONDS))).lost

    async def commit(self, request: batch_pb2.CommitLineRequest) -> bool:
        """Whether the result counts."""
        return (await self.ask(lambda stub: stub.CommitLine(request, timeout=_SECONDS))).kept

    async def give_back(self, request: batch_pb2.ReturnLineRequest) -> None:
        """A line is to be run later."""
        await self.ask(lambda stub: stub.ReturnLine(request, timeout=_SECONDS))

    async def start(self, request: batch_pb2.StartBatchRequest) -> None:
        """What came of checking a job's lines."""
        await self.ask(lambda stub: stub.StartBatch(request, timeout=_SECONDS))


def check_endpoint(value: object) -> str:
    """What a job's lines may call."""
    if not isinstance(value, str) or value not in ENDPOINTS:
        raise invalid("endpoint", f"endpoint is {shown(value)}: it must be one of {', '.join(ENDPOINTS)}")
    return value


def check_window(value: object) -> int:
    """Seconds of a completion window: 24h, or fewer whole hours."""
    hours = _HOURS.fullmatch(value) if isinstance(value, str) else None
    if value is not None and (hours is None or int(hours[1]) > _MAX_HOURS):
        raise invalid("completion_window", f"completion_window is {shown(value)}: it must be 1h to {_MAX_HOURS}h")
    return 3600 * (int(hours[1]) if hours else _MAX_HOURS)


def check_metadata(value: object) -> Mapping[str, str]:
    """The client's own words to a job."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > _MAX_METADATA:
        raise invalid("metadata", f"metadata is {shown(value)}: it must be an object of at most {_MAX_METADATA} names")
    for name, text in value.items():
        if not isinstance(text, str) or not 0 < len(name) <= _MAX_METADATA_NAME or len(text) > _MAX_METADATA_VALUE:
            words = f"it must have a name of 1 to {_MAX_METADATA_NAME} characters and a text of at most {_MAX_METADATA_VALUE}"
            raise invalid("metadata", f"metadata's {shown(name)} is {shown(text)}: {words}")
    return value


def check_key(value: str) -> str:
    """An idempotency key, or none."""
    if len(value) > _MAX_KEY_CHARS or not value.isprintable():
        raise invalid("idempotency_key", f"the idempotency key must have at most {_MAX_KEY_CHARS} printable characters")
    return value
