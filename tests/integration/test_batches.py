"""The scripts of jobs: every line gets one result, whoever dies, repeats itself or comes late."""

import asyncio
import json
import random
from typing import Any

import pytest

from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.batches import Batches, Caller, Held, Line
from services.scheduler.files import Caps, Files
from tests.integration.test_files import upload
from tests.scheduler_harness import LedgerBench, until

URL = "/v1/completions"
ACME = Caller("acme")


class Jobs:
    """Jobs of some lines each."""

    def __init__(self, bench: LedgerBench, *, lease_seconds: float = 60.0, **caps: int) -> None:
        self.bench = bench
        self.caps = Caps(**caps)
        self.files = Files(bench.store, self.caps)
        self.batches = Batches(bench.store, self.caps, lease_seconds)

    async def begin(self, batch_id: str, num_lines: int, org: str = "acme", *, window_seconds: int = 3600) -> None:
        """A job whose lines have been found good. Begin them before lines are leased: it looks for work itself."""
        await self.submit(batch_id, num_lines, org, window_seconds=window_seconds)
        await self.check(num_lines)

    async def submit(self, batch_id: str, num_lines: int, org: str = "acme", *, window_seconds: int = 3600) -> None:
        """A job that is to be checked."""
        file_id = f"file-of-{batch_id}"
        texts = [f'{{"line": {line}}}\n' for line in range(num_lines)]
        await upload(self.files, file_id, *("".join(texts[start : start + 3]) for start in range(0, num_lines, 3)), org=org)
        await self.batches.create(Caller(org), batch_id, file_id, URL, window_seconds, {})

    async def check(self, num_lines: int) -> None:
        """Finds the jobs good that are to be checked."""
        for check in (await self.batches.lease(4)).checks:
            assert await self.batches.start(check.batch_id, check.epoch, num_lines, [])

    async def lease(self, most: int = 4) -> list[Line]:
        return (await self.batches.lease(most)).lines

    async def status(self, batch_id: str = "batch_1", org: str = "acme") -> str:
        return (await self.batches.get(org, batch_id)).status

    async def results(self, batch_id: str = "batch_1", org: str = "acme") -> dict[int, str]:
        """Line -> its one result."""
        found: dict[int, str] = {}
        cursor = 0
        while True:
            results, following, _ = await self.batches.results(org, batch_id, cursor)
            if following == cursor:
                return found
            assert not found.keys() & {result.line for result in results}
            found |= {result.line: result.json for result in results}
            cursor = following


@pytest.fixture
def jobs(bench: LedgerBench) -> Jobs:
    return Jobs(bench)


async def test_a_job_from_its_lines_to_its_results(jobs: Jobs) -> None:
    await jobs.begin("batch_1", 7)
    assert await jobs.status() == "in_progress"
    seen = []
    while lines := await jobs.lease():
        seen += [json.loads(line.text)["line"] for line in lines]
        for line in lines:
            failed = line.held.line == 3
            assert await jobs.batches.commit(line.held, f"result {line.held.line}", failed=failed)
    assert seen == list(range(7))
    info = await jobs.batches.get("acme", "batch_1")
    assert (info.status, info.num_lines, info.num_completed, info.num_failed) == ("completed", 7, 6, 1)
    assert set(info.times) == {"in_progress", "finalizing", "completed"}
    assert await jobs.results() == {line: f"result {line}" for line in range(7)}
    output, _ = await jobs.files.read("acme", info.output_file_id, 0)
    assert output == "".join(f"result {line}\n" for line in range(7) if line != 3)
    assert (await jobs.files.get("acme", info.output_file_id)).num_bytes == len(output)
    assert await jobs.files.read("acme", info.error_file_id, 0) == ("result 3\n", 0)
    await jobs.files.delete("acme", "file-of-batch_1")


async def test_a_check_that_finds_faults_ends_the_job(jobs: Jobs) -> None:
    await upload(jobs.files, "file-a", "x\n")
    made = await jobs.batches.create(ACME, "batch_1", "file-a", URL, 60, {"for": "me"})
    assert (made.status, made.metadata) == ("validating", {"for": "me"})
    (check,) = (await jobs.batches.lease(4)).checks
    assert (check.batch_id, check.input_file_id, check.endpoint, check.org) == ("batch_1", "file-a", URL, "acme")
    assert (await jobs.batches.lease(4)).checks == [], "it is being checked"
    errors = [{"code": "invalid_json_line", "message": "no", "param": "", "line": 1}]
    assert await jobs.batches.start("batch_1", check.epoch, 1, errors)
    info = await jobs.batches.get("acme", "batch_1")
    assert (info.status, info.errors, info.output_file_id) == ("failed", errors, "")
    await jobs.files.delete("acme", "file-a")


async def test_a_check_is_taken_over_from_the_dead_and_the_dead_is_not_heard(bench: LedgerBench) -> None:
    jobs = Jobs(bench, lease_seconds=0.05)
    await upload(jobs.files, "file-a", "x\n")
    await jobs.batches.create(ACME, "batch_1", "file-a", URL, 60, {})
    (first,) = (await jobs.batches.lease(4)).checks
    checks: list[Any] = []

    async def taken_over() -> bool:
        checks.extend((await jobs.batches.lease(4)).checks)
        return bool(checks)

    await until(taken_over)
    assert not await jobs.batches.start("batch_1", first.epoch, 1, [])
    assert await jobs.batches.renew([Held("batch_1", -1, first.epoch)]) == [Held("batch_1", -1, first.epoch)]
    assert await jobs.batches.renew([Held("batch_1", -1, checks[0].epoch)]) == []
    assert await jobs.batches.start("batch_1", checks[0].epoch, 1, [])


async def test_the_first_result_counts_and_a_stale_epoch_is_refused(bench: LedgerBench) -> None:
    jobs = Jobs(bench, lease_seconds=0.05)
    await jobs.begin("batch_1", 2)
    (old, _) = await jobs.lease()
    lines: list[Line] = []

    async def lost() -> bool:
        lines.extend(await jobs.lease())
        return any(line.held.line == old.held.line for line in lines)

    await until(lost)
    new = next(line for line in lines if line.held.line == old.held.line)
    assert (new.held.epoch, new.strikes) == (2, 1)
    assert not await jobs.batches.commit(old.held, "late", failed=False)
    assert await jobs.batches.renew([old.held]) == [old.held]
    await jobs.batches.give_back(old.held, 100, 100, strike=True)  # changes nothing
    assert await jobs.batches.commit(new.held, "result", failed=False)
    assert await jobs.batches.commit(new.held, "result", failed=False), "sent again"
    assert not await jobs.batches.commit(new.held, "another", failed=True)
    assert await jobs.results() == {0: "result"}


async def test_a_late_result_counts_while_nobody_else_has_the_line(bench: LedgerBench) -> None:
    jobs = Jobs(bench, lease_seconds=0.05)
    await jobs.begin("batch_1", 1)
    (line,) = await jobs.lease()
    _, taken, *_ = keys.lines_of("batch_1")
    await until(lambda: _is_over(bench, taken))
    assert await jobs.batches.renew([line.held]) == [], "renewed, though late"
    assert await jobs.batches.commit(line.held, "result", failed=False)
    assert await jobs.status() == "completed"
    assert await jobs.batches.commit(line.held, "result", failed=False), "the answer to the first may have been lost"


async def _is_over(bench: LedgerBench, taken: str) -> bool:
    (_, at), now = await bench.raw("ZRANGE", taken, 0, 0, "WITHSCORES"), await bench.raw("TIME")
    return float(at) < int(now[0]) * 1000 + int(now[1]) // 1000


async def test_a_line_given_back_waits_and_so_may_its_job(jobs: Jobs, bench: LedgerBench) -> None:
    await jobs.begin("batch_1", 3)
    first, second = await jobs.lease(2)
    await jobs.batches.give_back(first.held, 60, 0, strike=True)
    (third,) = await jobs.lease()
    assert third.held.line == 2, "the one that was given back isn't due"
    await jobs.batches.give_back(third.held, 0, 0.1, strike=False)
    assert await jobs.lease() == [], "the job pauses"
    again: list[Line] = []

    async def goes_on() -> bool:
        again.extend(await jobs.lease())
        return bool(again)

    await until(goes_on)
    assert [(line.held.line, line.held.epoch, line.strikes) for line in again] == [(2, 2, 0)]
    todo, *_ = keys.lines_of("batch_1")
    await bench.raw("ZADD", todo, 0, first.held.line)
    await bench.raw("ZADD", keys.READY, 0, "batch_1")
    (back,) = await jobs.lease()
    assert (back.held.line, back.held.epoch, back.strikes) == (0, 2, 1)
    assert second.held.epoch == 1


async def test_cancelled_lines_get_results_that_say_so(jobs: Jobs) -> None:
    await jobs.begin("batch_1", 5)
    running, done = await jobs.lease(2)
    assert await jobs.batches.commit(done.held, "result", failed=False)
    assert (await jobs.batches.stop("acme", "batch_1")).status == "cancelling"
    assert await jobs.batches.renew([running.held]) == [running.held], "it is to end"
    lines = await jobs.lease()
    assert {line.verdict for line in lines} == {"batch_cancelled"}
    assert sorted(line.held.line for line in lines) == [0, 2, 3, 4]
    for line in lines:
        assert await jobs.batches.commit(line.held, "cancelled", failed=True)
    info = await jobs.batches.get("acme", "batch_1")
    assert (info.status, info.num_completed, info.num_failed) == ("cancelled", 1, 4)
    assert (await jobs.batches.stop("acme", "batch_1")).status == "cancelled", "asked again"
    assert await jobs.lease() == []


async def test_what_is_over_can_t_be_cancelled_and_what_is_checked_is_at_once(jobs: Jobs) -> None:
    await jobs.begin("batch_1", 1)
    (line,) = await jobs.lease()
    await jobs.batches.commit(line.held, "result", failed=False)
    with pytest.raises(StatusError, match="completed: there is nothing to cancel") as caught:
        await jobs.batches.stop("acme", "batch_1")
    assert caught.value.code is Code.FAILED_PRECONDITION
    await jobs.batches.create(ACME, "batch_2", "file-of-batch_1", URL, 60, {})
    (check,) = (await jobs.batches.lease(4)).checks
    assert (await jobs.batches.stop("acme", "batch_2")).status == "cancelled"
    assert not await jobs.batches.start("batch_2", check.epoch, 1, [])


async def test_lines_without_a_result_at_the_window_s_end_get_one(jobs: Jobs) -> None:
    await jobs.begin("batch_1", 2, window_seconds=1)
    (running,) = await jobs.lease(1)
    lines: list[Line] = []

    async def over() -> bool:
        lines.extend(await jobs.lease())
        return any(line.verdict for line in lines)

    await jobs.batches.give_back((await jobs.lease(1))[0].held, 3000, 0, strike=False)
    await until(over)
    assert [(line.held.line, line.verdict) for line in lines] == [(1, "batch_expired")]
    assert await jobs.batches.commit(lines[0].held, "expired", failed=True)
    assert await jobs.status() == "finalizing"
    assert await jobs.batches.commit(running.held, "just in time", failed=False)
    assert await jobs.status() == "expired"


async def test_orgs_take_turns_and_so_do_jobs(jobs: Jobs) -> None:
    for number in range(3):
        await jobs.submit(f"batch_{number}", 8)
    await jobs.submit("batch_b", 8, org="other")
    await jobs.check(8)
    taken: dict[str, int] = {}
    for _ in range(2):
        for line in await jobs.lease(4):
            taken[line.held.batch_id] = taken.get(line.held.batch_id, 0) + 1
    assert taken.pop("batch_b") == 4, "half of what is in flight is the other org's"
    assert sorted(taken.values()) == [1, 1, 2]


async def test_jobs_wait_while_their_org_s_storage_is_full(bench: LedgerBench) -> None:
    jobs = Jobs(bench, org=200)
    await jobs.begin("batch_1", 2)
    await bench.raw("HSET", keys.STORED, "acme", 200)
    assert await jobs.lease() == []
    assert (await jobs.batches.get("acme", "batch_1")).waiting_for == "storage"
    await bench.raw("HSET", keys.STORED, "acme", 0)
    await bench.raw("ZADD", keys.READY, 0, "batch_1")
    assert len(await jobs.lease()) == 2
    assert (await jobs.batches.get("acme", "batch_1")).waiting_for == ""


async def test_a_key_makes_one_job(jobs: Jobs) -> None:
    await upload(jobs.files, "file-a", "x\n")
    caller = Caller("acme", key="k", fingerprint="f")
    first = await jobs.batches.create(caller, "batch_1", "file-a", URL, 60, {})
    again = await jobs.batches.create(caller, "batch_2", "file-a", URL, 60, {})
    assert again.batch_id == first.batch_id
    with pytest.raises(StatusError, match="used for another job"):
        await jobs.batches.create(Caller("acme", key="k", fingerprint="g"), "batch_3", "file-a", URL, 60, {})
    with pytest.raises(StatusError, match="there is no file"):
        await jobs.batches.create(Caller("other", key="k", fingerprint="f"), "batch_4", "file-a", URL, 60, {})
    (listed, more) = await jobs.batches.listed("acme", "", 10)
    assert ([info.batch_id for info in listed], more) == (["batch_1"], False)


async def test_jobs_of_an_org_are_bounded_and_its_alone(bench: LedgerBench) -> None:
    jobs = Jobs(bench, open_batches=2)
    await upload(jobs.files, "file-a", "x\n")
    for number in range(2):
        await jobs.batches.create(ACME, f"batch_{number}", "file-a", URL, 60, {})
    with pytest.raises(StatusError, match="2 open jobs") as caught:
        await jobs.batches.create(ACME, "batch_9", "file-a", URL, 60, {})
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    words = set()
    for name in ("batch_1", "batch_none"):
        for work in (jobs.batches.get("other", name), jobs.batches.stop("other", name), jobs.batches.results("other", name, 0)):
            with pytest.raises(StatusError) as refused:
                await work
            assert refused.value.code is Code.NOT_FOUND
            words.add(refused.value.message.replace(name, "ID"))
    assert len(words) == 1
    assert await jobs.batches.listed("other", "", 10) == ([], False)


async def test_a_job_goes_after_its_time_with_all_that_it_had(bench: LedgerBench) -> None:
    jobs = Jobs(bench, keep_seconds=1)
    await jobs.begin("batch_1", 2)
    for number, line in enumerate(await jobs.lease()):
        await jobs.batches.commit(line.held, "result", failed=bool(number))

    async def gone() -> bool:
        await jobs.batches.sweep()
        return int(await bench.raw("DBSIZE")) == 1

    await until(gone)
    with pytest.raises(StatusError, match="there is no batch"):
        await jobs.batches.get("acme", "batch_1")


async def test_runners_that_come_and_go_leave_one_result_a_line(bench: LedgerBench) -> None:
    """Six runners that forget lines, give them back and commit late, in a fixed order of chances."""
    jobs, chance = Jobs(bench, lease_seconds=0.03), random.Random(7)
    for number in range(3):
        await jobs.submit(f"batch_{number}", 40, org=f"org{number}")
    await jobs.check(40)
    kept: list[tuple[str, int]] = []

    async def run() -> None:
        while True:
            for line in await jobs.lease():
                draw = chance.random()
                if draw < 0.2:
                    continue  # it dies
                if draw < 0.4:
                    await jobs.batches.give_back(line.held, 0.01, 0, strike=True)
                    continue
                if draw < 0.6:
                    await asyncio.sleep(0.05)  # it comes late
                if await jobs.batches.commit(line.held, f"{line.held.epoch}/{draw}", failed=draw > 0.9):
                    kept.append((line.held.batch_id, line.held.line))
            await asyncio.sleep(0.002)

    async def all_over() -> bool:
        return all([await jobs.status(f"batch_{number}", f"org{number}") == "completed" for number in range(3)])

    runners = [asyncio.create_task(run()) for _ in range(6)]
    await until(all_over, seconds=30)
    for runner in runners:
        runner.cancel()
    await asyncio.gather(*runners, return_exceptions=True)
    assert len(kept) == len(set(kept)) == 120
    for number in range(3):
        info = await jobs.batches.get(f"org{number}", f"batch_{number}")
        assert info.num_completed + info.num_failed == 40
        assert len(await jobs.results(f"batch_{number}", f"org{number}")) == 40
