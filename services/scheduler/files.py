"""Files of orgs in Redis, in parts of whole lines: bounded in bytes, kept for a time. A job's results are read as files, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import Code, StatusError, invalid
from services.scheduler import keys
from services.scheduler.store import Call, Store

MIB = 1 << 20
PURPOSES = ("batch",)
MAX_PART_BYTES = 2 * MIB
MAX_FILENAME_CHARS = 256
PIECE_BYTES = MIB
"""From which a piece of results is enough; it may be larger by one result."""
_LINES_AT_ONCE = 1000
_UNFINISHED_SECONDS = 600
Args = list[str | int | float]
_FIELDS = ("org", "state", "name", "purpose", "bytes", "created", "expires", "total")


@dataclass(frozen=True)
class Caps:
    """How much is kept, and for how long. Bytes, unless said."""

    file: int = 64 * MIB
    org: int = 256 * MIB
    all: int = 1024 * MIB
    files: int = 1000
    """Of one org."""
    open_batches: int = 100
    """Of one org."""
    batches: int = 1000
    """Of one org, those that are over among them."""
    keep_seconds: int = 86_400
    """A file after it came, a job and its results after its end."""


@dataclass(frozen=True)
class FileInfo:
    """A file. Unix seconds."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int
    num_lines: int
    """Of the job whose results it holds; 0: it was uploaded."""


class Files:
    """The files of all orgs. What another org has is NOT_FOUND, in the same words as what never was."""

    def __init__(self, store: Store, caps: Caps) -> None:
        self._store = store
        self._caps = caps

    async def put_part(self, org: str, file_id: str, number: int, text: str, first_line: int) -> None:
        """Adds whole lines. RESOURCE_EXHAUSTED names the bound that they would break."""
        caps, size = self._caps, len(text.encode())
        if not 0 < size <= MAX_PART_BYTES or number < 0 or first_line < 0:
            raise invalid("text", f"part {number} from line {first_line} has {size} bytes; it must have 1 to {MAX_PART_BYTES}")
        key_names = [keys.file(file_id), keys.parts(file_id), keys.starts(file_id), keys.files(org)]
        args: Args = [file_id, org, number, text, first_line, caps.file, caps.org, caps.all, caps.files, _UNFINISHED_SECONDS * 1000]
        outcome = await self._store.run(Call("file_part", key_names, args))
        if outcome == "none":
            raise not_found("file", file_id)
        if outcome != "done":
            raise self._full(outcome, org)

    async def close(self, org: str, file_id: str, filename: str, purpose: str, num_parts: int, keep_seconds: int) -> FileInfo:
        """Ends a file whose parts are all there; it is kept for so long, 0: as long as files are."""
        most = self._caps.keep_seconds
        if purpose not in PURPOSES:
            raise invalid("purpose", f"purpose is {purpose[:64]!a}; there are: {', '.join(PURPOSES)}")
        if not 0 <= keep_seconds <= most:
            raise invalid("expires_after", f"expires_after is {keep_seconds} s; this mesh keeps files for at most {most} s: ask for less")
        if not 0 < len(filename) <= MAX_FILENAME_CHARS or not filename.isprintable():
            raise invalid("filename", f"filename is {filename[:80]!a}; it must have 1 to {MAX_FILENAME_CHARS} printable characters")
        key_names = [keys.file(file_id), keys.parts(file_id), keys.files(org)]
        args: Args = [file_id, org, filename, purpose, num_parts, (keep_seconds or most) * 1000]
        outcome = await self._store.run(Call("file_close", key_names, args))
        if outcome == "parts":
            raise StatusError(Code.FAILED_PRECONDITION, f"file {file_id} has not come whole: send it again", reason="INCOMPLETE_FILE")
        return await self.get(org, file_id)

    async def get(self, org: str, file_id: str) -> FileInfo:
        """What is known of a file; NOT_FOUND."""
        (info,) = await self._infos(org, [file_id])
        if info is None:
            raise not_found("file", file_id)
        return info

    async def listed(self, org: str, after: str, limit: int, purpose: str = "") -> tuple[list[FileInfo], bool]:
        """The newest first, and whether there are more. `after` names the last of the page before."""
        ids = await page_of(self._store, keys.files(org), after, 0 if purpose else limit + 1)
        infos = [info for info in await self._infos(org, ids) if info is not None and purpose in ("", info.purpose)]
        return infos[:limit], len(infos) > limit

    async def delete(self, org: str, file_id: str) -> None:
        """Takes a file out. NOT_FOUND; FAILED_PRECONDITION where an open job reads or writes it."""
        outcome = await self._store.run(Call("file_delete", [keys.file(file_id)], [file_id, org]))
        if outcome == "none":
            raise not_found("file", file_id)
        if outcome == "used":
            words = f"a job that is not over needs file {file_id}: cancel it, or wait for its end"
            raise StatusError(Code.FAILED_PRECONDITION, words, reason="FILE_IN_USE")

    async def read(self, org: str, file_id: str, cursor: int) -> tuple[str, int]:
        """A piece of a file, and the cursor of the next; 0: it was the last."""
        info = await self.get(org, file_id)
        if info.num_lines:
            args = [cursor, info.num_lines, PIECE_BYTES, _LINES_AT_ONCE]
            following, *texts = await self._store.run(Call("results_by_line", [keys.results(file_id)], args))
            return "".join(texts), int(following)
        number_of_parts, text = await self._store.commands(["HLEN", keys.parts(file_id)], ["HGET", keys.parts(file_id), cursor])
        return text or "", cursor + 1 if cursor + 1 < int(number_of_parts) else 0

    async def _infos(self, org: str, file_ids: Sequence[str]) -> list[FileInfo | None]:
        replies = await self._store.commands(*(["HMGET", keys.file(file_id), *_FIELDS] for file_id in file_ids)) if file_ids else []
        return [_parse(file_id, org, reply) for file_id, reply in zip(file_ids, replies, strict=True)]

    def _full(self, bound: str, org: str) -> StatusError:
        caps = self._caps
        if bound == "file":
            words = f"the file is larger than {caps.file} bytes, the most that one may have: split it"
            return StatusError(Code.RESOURCE_EXHAUSTED, words, reason="FILE_TOO_LARGE")
        if bound == "files":
            words = f"{org} has {caps.files} files, the most that an org may have: delete some"
            return StatusError(Code.RESOURCE_EXHAUSTED, words, reason="TOO_MANY_FILES")
        whose, most = (f"{org}'s files", caps.org) if bound == "org" else ("all files", caps.all)
        words = f"{whose} would be larger than {most} bytes together: delete some, or wait until they expire"
        return StatusError(Code.RESOURCE_EXHAUSTED, words, reason="STORAGE_FULL")


async def page_of(store: Store, key: str, after: str, limit: int) -> list[str]:
    """Members of a sorted set behind `after`, highest score first; limit 0: all. Nothing behind what isn't there."""
    start = 0
    if after:
        (rank,) = await store.commands(["ZREVRANK", key, after])
        if rank is None:
            return []
        start = int(rank) + 1
    (members,) = await store.commands(["ZREVRANGE", key, start, start + limit - 1 if limit else -1])
    return [str(member) for member in members]


def not_found(kind: str, name: str) -> StatusError:
    """The same words whether it is another org's or never was."""
    return StatusError(
        Code.NOT_FOUND, f"there is no {kind} {name[:64]!a}: it may have expired or been deleted", reason=f"NO_{kind.upper()}"
    )


def _parse(file_id: str, org: str, reply: Sequence[Any]) -> FileInfo | None:
    whose, state, name, purpose, size, created, expires, total = reply
    if whose != org or state != "whole":
        return None
    return FileInfo(file_id, name, purpose, int(size), int(created) // 1000, int(expires) // 1000, int(total or 0))
