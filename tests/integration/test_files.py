"""Files in Redis: whole or not there, bounded in every direction, their org's alone, and gone after their time."""

import pytest

from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.batches import Batches, Caller
from services.scheduler.files import Caps, FileInfo, Files
from tests.scheduler_harness import LedgerBench, until


async def upload(files: Files, file_id: str, *parts: str, org: str = "acme", keep_seconds: int = 0) -> FileInfo:
    """A whole file of these parts."""
    first = 0
    for number, text in enumerate(parts):
        await files.put_part(org, file_id, number, text, first)
        first += text.count("\n")
    return await files.close(org, file_id, "lines.jsonl", "batch", len(parts), keep_seconds)


async def _whole(files: Files, file_id: str, org: str = "acme") -> str:
    text, cursor = await files.read(org, file_id, 0)
    while cursor:
        piece, cursor = await files.read(org, file_id, cursor)
        text += piece
    return text


async def _refusal(work: object) -> tuple[Code, str]:
    with pytest.raises(StatusError) as caught:
        await work  # type: ignore[misc]
    return caught.value.code, caught.value.reason


async def _stored(bench: LedgerBench, org: str = "acme") -> tuple[int, int]:
    of_org, of_all = await bench.raw("HMGET", keys.STORED, org, "")
    return int(of_org or 0), int(of_all or 0)


@pytest.fixture
def files(bench: LedgerBench) -> Files:
    return Files(bench.store, Caps(file=100, org=150, all=200, files=3))


async def test_a_file_comes_back_as_it_came(files: Files) -> None:
    info = await upload(files, "file-a", "eins\nzwei\n", "drei: ü\n", "vier")
    assert (info.filename, info.purpose, info.num_bytes) == ("lines.jsonl", "batch", 23)
    assert info.expires_at - info.created_at == 86_400
    assert await _whole(files, "file-a") == "eins\nzwei\ndrei: ü\nvier"


async def test_a_part_sent_again_counts_once(files: Files, bench: LedgerBench) -> None:
    for _ in range(3):
        await files.put_part("acme", "file-a", 0, "eins\n", 0)
    assert await _stored(bench) == (5, 5)
    for _ in range(2):
        info = await files.close("acme", "file-a", "a", "batch", 1, 0)
        assert info.num_bytes == 5
    assert await _refusal(files.put_part("acme", "file-a", 1, "zwei\n", 1)) == (Code.NOT_FOUND, "NO_FILE"), "it has ended"


async def test_a_file_with_a_part_missing_is_none(files: Files) -> None:
    await files.put_part("acme", "file-a", 0, "eins\n", 0)
    assert await _refusal(files.get("acme", "file-a")) == (Code.NOT_FOUND, "NO_FILE"), "it hasn't come whole"
    assert await _refusal(files.close("acme", "file-a", "a", "batch", 2, 0)) == (Code.FAILED_PRECONDITION, "INCOMPLETE_FILE")


async def test_every_bound_has_its_refusal_and_counts_nothing(files: Files, bench: LedgerBench) -> None:
    await upload(files, "file-a", "x" * 60 + "\n")
    assert await _refusal(files.put_part("acme", "file-b", 0, "y" * 101, 0)) == (Code.RESOURCE_EXHAUSTED, "FILE_TOO_LARGE")
    assert await _refusal(files.put_part("acme", "file-b", 0, "y" * 90, 0)) == (Code.RESOURCE_EXHAUSTED, "STORAGE_FULL")
    await files.put_part("other", "file-c", 0, "z" * 90, 0)
    with pytest.raises(StatusError, match="all files would be larger than 200 bytes"):
        await files.put_part("third", "file-d", 0, "z" * 50, 0)
    assert await _stored(bench) == (61, 151)
    for name in "bc":
        await upload(files, f"file-{name}1", "x\n")
    assert await _refusal(files.put_part("acme", "file-e", 0, "x\n", 0)) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_FILES")


async def test_another_org_s_file_is_as_unknown_as_none(files: Files) -> None:
    await upload(files, "file-a", "eins\n")
    words = []
    for file_id in ("file-a", "file-b"):
        for work in (files.get("other", file_id), files.read("other", file_id, 0), files.delete("other", file_id)):
            with pytest.raises(StatusError) as caught:
                await work
            assert caught.value.code is Code.NOT_FOUND
            words.append(caught.value.message.replace(file_id, "ID"))
    assert len(set(words)) == 1
    assert await _refusal(files.put_part("other", "file-a", 0, "x\n", 0)) == (Code.NOT_FOUND, "NO_FILE")
    assert await files.listed("other", "", 10) == ([], False)


async def test_deleting_gives_the_bytes_back(files: Files, bench: LedgerBench) -> None:
    await upload(files, "file-a", "eins\n", "zwei\n")
    await files.delete("acme", "file-a")
    assert await _stored(bench) == (0, 0)
    assert await bench.raw("DBSIZE") == 1, "nothing is left but the schema"
    assert await _refusal(files.delete("acme", "file-a")) == (Code.NOT_FOUND, "NO_FILE")


async def test_lists_are_newest_first_and_in_pages(files: Files, bench: LedgerBench) -> None:
    for number, name in enumerate("abc"):
        await upload(files, f"file-{name}", "x\n")
        await bench.raw("ZADD", keys.files("acme"), number, f"file-{name}")
    first, more = await files.listed("acme", "", 2)
    assert ([info.file_id for info in first], more) == (["file-c", "file-b"], True)
    second, more = await files.listed("acme", "file-b", 2)
    assert ([info.file_id for info in second], more) == (["file-a"], False)
    assert await files.listed("acme", "", 2, "batch_output") == ([], False)
    assert await files.listed("acme", "file-gone", 2) == ([], False)


async def test_a_file_goes_after_its_time_but_not_from_under_a_job(files: Files, bench: LedgerBench) -> None:
    batches = Batches(bench.store, Caps())
    for name in "ab":
        await upload(files, f"file-{name}", "x\n", keep_seconds=1)
    await batches.create(Caller("acme"), "batch_1", "file-b", "/v1/completions", 60, {})

    async def swept() -> bool:
        return (await batches.sweep()).num_files == 1

    await until(swept)
    assert await _refusal(files.get("acme", "file-a")) == (Code.NOT_FOUND, "NO_FILE")
    assert (await files.get("acme", "file-b")).num_bytes == 2
    assert await _refusal(files.delete("acme", "file-b")) == (Code.FAILED_PRECONDITION, "FILE_IN_USE")


async def test_an_upload_that_was_given_up_goes(files: Files, bench: LedgerBench) -> None:
    await files.put_part("acme", "file-a", 0, "eins\n", 0)
    assert 500_000 < float(await bench.raw("ZSCORE", keys.EXPIRING, "file:file-a")) - 1000 * int((await bench.raw("TIME"))[0]) < 601_000
    await files.delete("acme", "file-a")
    assert await _stored(bench) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"keep_seconds": 90_000}, "expires_after"),
        ({"filename": "a\nb"}, "filename"),
        ({"filename": ""}, "filename"),
    ],
)
async def test_what_a_file_can_t_be(files: Files, fields: dict[str, str | int], field: str) -> None:
    await files.put_part("acme", "file-a", 0, "eins\n", 0)
    with pytest.raises(StatusError) as caught:
        await files.close("acme", "file-a", **{"filename": "a", "purpose": "batch", "num_parts": 1, "keep_seconds": 0} | fields)  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [field]
