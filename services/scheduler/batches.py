"""Jobs in Redis: their lines are leased to runners, and each line gets one result. Each script of lua/batch_* as a Python call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.files import PIECE_BYTES, Args, Caps, not_found, page_of
from services.scheduler.store import Call, Store

LEASE_SECONDS = 15.0
_STORAGE_SECONDS = 5.0
"""Until it is looked again whether there is room for results."""
_RESULTS_AT_ONCE = 500
_SWEPT_AT_ONCE = 100
_USED_SECONDS = 60
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_FIELDS = ("org", "status", "input", "output", "error", "endpoint", "total", "completed", "failed", "expires", "window", "created",
           "metadata", "errors", "waiting_for", *(f"{name}_at" for name in _TIMES))  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """What a job is asked for with. `key`: an idempotency key, or empty."""

    org: str
    key: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class BatchInfo:
    """A job. Unix seconds; `times`: by status, those that it has had."""

    batch_id: str
    status: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    num_lines: int
    num_completed: int
    num_failed: int
    window_seconds: int
    created_at: int
    expires_at: int
    waiting_for: str
    times: Mapping[str, int]
    metadata: Mapping[str, str]
    errors: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Held:
    """A line that somebody works on; line -1: the check of a job."""

    batch_id: str
    line: int
    epoch: int


@dataclass(frozen=True)
class Line:
    """A line to run."""

    held: Held
    org: str
    endpoint: str
    seconds_left: float
    strikes: int
    verdict: str
    text: str


@dataclass(frozen=True)
class Check:
    """A job to check."""

    batch_id: str
    epoch: int
    org: str
    endpoint: str
    input_file_id: str


@dataclass
class Work:
    """What a runner takes."""

    lines: list[Line] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """A line's. `json`: without its line break."""

    line: int
    failed: bool
    json: str


@dataclass(frozen=True)
class Swept:
    """What was taken out, and how things stand."""

    num_files: int = 0
    num_batches: int = 0
    num_open: int = 0
    num_bytes: int = 0


class Batches:
    """The jobs of all orgs."""

    def __init__(self, store: Store, caps: Caps, lease_seconds: float = LEASE_SECONDS) -> None:
        self._store = store
        self._caps = caps
        self._lease_ms = round(lease_seconds * 1000)

    async def create(
        self, caller: Caller, batch_id: str, input_file_id: str, endpoint: str, window_seconds: int, metadata: Mapping[str, str]
    ) -> BatchInfo:
        """Begins a job, or finds the one of the same key. NOT_FOUND: the file; ALREADY_EXISTS, RESOURCE_EXHAUSTED."""
        caps, org, stem = self._caps, caller.org, batch_id.removeprefix("batch_")
        key_names = [keys.batch(batch_id), keys.file(input_file_id), keys.open_batches(org), keys.batches(org)]
        if caller.key:
            key_names.append(keys.submitted(org, caller.key))
        outputs = (f"file-{stem}o", f"file-{stem}e")
        args: Args = [batch_id, org, input_file_id, endpoint, window_seconds * 1000, json.dumps(dict(metadata)), *outputs]
        args += [caps.keep_seconds * 1000, caps.open_batches, caps.batches, caller.fingerprint]
        outcome, *known = await self._store.run(Call("batch_create", key_names, args))
        if outcome == "none":
            raise not_found("file", input_file_id)
        if outcome == "differs":
            words = "the idempotency key was used for another job: use a new one"
            raise StatusError(Code.ALREADY_EXISTS, words, reason="IDEMPOTENCY_KEY_USED")
        if outcome == "full":
            words = f"{org} has {caps.open_batches} open jobs or {caps.batches} in all, the most that it may have: wait until some are gone"
            raise StatusError(Code.RESOURCE_EXHAUSTED, words, reason="TOO_MANY_BATCHES")
        return await self.get(org, known[0])

    async def get(self, org: str, batch_id: str) -> BatchInfo:
        """The job as it stands; NOT_FOUND."""
        (info,) = await self._infos(org, [batch_id])
        if info is None:
            raise not_found("batch", batch_id)
        return info

    async def listed(self, org: str, after: str, limit: int) -> tuple[list[BatchInfo], bool]:
        """The newest first, and whether there are more."""
        ids = await page_of(self._store, keys.batches(org), after, limit + 1)
        infos = [info for info in await self._infos(org, ids) if info is not None]
        return infos[:limit], len(ids) > limit

    async def stop(self, org: str, batch_id: str) -> BatchInfo:
        """Asks a job to end. NOT_FOUND; FAILED_PRECONDITION: it is over."""
        outcome = await self._store.run(Call("batch_stop", [keys.batch(batch_id)], [batch_id, org]))
        if outcome == "none":
            raise not_found("batch", batch_id)
        if outcome != "done":
            raise StatusError(Code.FAILED_PRECONDITION, f"batch {batch_id} is {outcome}: there is nothing to cancel", reason="BATCH_OVER")
        return await self.get(org, batch_id)

    async def start(self, batch_id: str, epoch: int, num_lines: int, errors: Sequence[Mapping[str, Any]]) -> bool:
        """Takes what came of a check; False: another's counts."""
        todo, *_ = keys.lines_of(batch_id)
        args: Args = [batch_id, epoch, num_lines, json.dumps(list(errors)) if errors else ""]
        return bool(await self._store.run(Call("batch_start", [todo], args)))

    async def lease(self, most: int) -> Work:
        """Takes work, at most so many lines."""
        caps = self._caps
        args: Args = [most, self._lease_ms, caps.org, caps.all, round(_STORAGE_SECONDS * 1000)]
        reply = await self._store.run(Call("batch_lease", [keys.READY], args))
        checks = [Check(row[1], int(row[2]), *row[3:6]) for row in reply if row[0] == "check"]
        rows = [row for row in reply if row[0] == "line"]
        parts = await self._store.commands(*(["HGET", keys.parts(row[6]), row[7]] for row in rows)) if rows else []
        return Work([_line(row, part) for row, part in zip(rows, parts, strict=True)], checks)

    async def renew(self, held: Sequence[Held]) -> list[Held]:
        """Says that these are still worked on; those that are the caller's no more."""
        by_batch: dict[str, dict[int, int]] = {}
        for one in held:
            by_batch.setdefault(one.batch_id, {})[one.line] = one.epoch
        calls = []
        for batch_id, epochs in by_batch.items():
            todo, taken, *_ = keys.lines_of(batch_id)
            flat = [number for entry in epochs.items() for number in entry]
            calls.append(Call("batch_renew", [todo, taken], [batch_id, self._lease_ms, *flat]))
        replies = await self._store.run_many(calls) if calls else []
        lost = zip(by_batch.items(), replies, strict=True)
        return [Held(batch_id, int(line), epochs[int(line)]) for (batch_id, epochs), lines in lost for line in lines]

    async def commit(self, held: Held, result: str, *, failed: bool) -> bool:
        """Writes a line's result down; whether it counts."""
        todo, taken, _, _, ended = keys.lines_of(held.batch_id)
        args: Args = [held.batch_id, held.line, held.epoch, result + "\n", int(failed)]
        return bool(await self._store.run(Call("batch_commit", [todo, taken, ended], args)))

    async def give_back(self, held: Held, delay_seconds: float, pause_seconds: float, *, strike: bool) -> None:
        """A line is to be run later; for `pause_seconds` none of its job."""
        todo, taken, _, strikes, _ = keys.lines_of(held.batch_id)
        delay, pause = round(max(0.0, delay_seconds) * 1000), round(max(0.0, pause_seconds) * 1000)
        args: Args = [held.batch_id, held.line, held.epoch, delay, pause, int(strike)]
        await self._store.run(Call("batch_return", [todo, taken, strikes], args))

    async def results(self, org: str, batch_id: str, cursor: int) -> tuple[list[Result], int, BatchInfo]:
        """Results behind the first `cursor` of them, how many have been read then, and the job as it stood before."""
        info = await self.get(org, batch_id)
        stem = batch_id.removeprefix("batch_")
        *_, ended = keys.lines_of(batch_id)
        key_names = [ended, keys.results(f"file-{stem}o"), keys.results(f"file-{stem}e")]
        following, *flat = await self._store.run(Call("results_by_time", key_names, [cursor, PIECE_BYTES, _RESULTS_AT_ONCE]))
        triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return [Result(int(line), bool(int(failed)), text.rstrip("\n")) for line, failed, text in triples], int(following), info

    async def sweep(self) -> Swept:
        """Takes out what has been kept for its time."""
        reply = await self._store.run(Call("batch_sweep", [keys.EXPIRING], [_SWEPT_AT_ONCE, _USED_SECONDS * 1000]))
        return Swept(*map(int, reply))

    async def _infos(self, org: str, batch_ids: Sequence[str]) -> list[BatchInfo | None]:
        replies = await self._store.commands(*(["HMGET", keys.batch(batch_id), *_FIELDS] for batch_id in batch_ids)) if batch_ids else []
        return [_parse(batch_id, org, reply) for batch_id, reply in zip(batch_ids, replies, strict=True)]


def _line(row: Sequence[Any], part: str | None) -> Line:
    _, batch_id, line, epoch, org, endpoint, _, _, first, ms_left, strikes, verdict = row
    text = (part or "").split("\n")[int(line) - int(first)]
    return Line(Held(batch_id, int(line), int(epoch)), org, endpoint, int(ms_left) / 1000, int(strikes), verdict, text)


def _parse(batch_id: str, org: str, reply: Sequence[Any]) -> BatchInfo | None:
    f = dict(zip(_FIELDS, reply, strict=True))
    if f["org"] != org:
        return None
    completed, failed = int(f["completed"] or 0), int(f["failed"] or 0)
    over = f["status"] in ("completed", "expired", "cancelled")
    return BatchInfo(
        batch_id=batch_id,
        status=f["status"],
        endpoint=f["endpoint"],
        input_file_id=f["input"],
        output_file_id=f["output"] if over and completed else "",
        error_file_id=f["error"] if over and failed else "",
        num_lines=int(f["total"] or 0),
        num_completed=completed,
        num_failed=failed,
        window_seconds=int(f["window"]) // 1000,
        created_at=int(f["created"]) // 1000,
        expires_at=int(f["expires"]) // 1000,
        waiting_for=f["waiting_for"] or "",
        times={name: int(f[f"{name}_at"]) // 1000 for name in _TIMES if f[f"{name}_at"]},
        metadata=json.loads(f["metadata"]),
        errors=json.loads(f["errors"] or "[]"),
    )
