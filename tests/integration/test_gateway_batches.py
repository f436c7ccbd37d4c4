"""Files and jobs at the HTTP face, with a real store and a runner; workers are scripts."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from forebay.v1 import batch_pb2, inference_pb2
from services.common.errors import Code, StatusError, from_rpc, unavailable
from services.gateway.batch_runner import BatchRunner, Timing
from services.gateway.batches import Jobs
from services.gateway.http.line import LineFace
from services.scheduler.batch_server import BatchServicer
from services.scheduler.batches import Batches
from services.scheduler.files import Caps, Files
from services.scheduler.store import Store
from tests.fakes import Script, play, stall
from tests.scheduler_harness import until
from tests.unit.gateway.build import Stack, letters, make_token, stack

URL = "/v1/completions"
QUICK = Timing(idle=0.05, renew=0.1, restart=0.01, backoff=0.001)
OTHER = {"authorization": make_token("other")}


def lines(num: int, url: str = URL, **body: Any) -> bytes:
    """A file of so many requests."""
    asked = {"prompt": "a"} | body
    entries = [{"custom_id": f"id-{number}", "method": "POST", "url": url, "body": asked} for number in range(num)]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


@asynccontextmanager
async def jobs_stack(url: str, *scripts: Script, runner: bool = True, caps: Caps | None = None, **options: Any) -> AsyncIterator[Stack]:
    """A gateway whose scheduler keeps files and jobs in this Redis, with a runner of its own."""
    store = Store(url, timeout_seconds=5)
    await store.open()
    caps = caps or Caps()
    servicer = BatchServicer(Files(store, caps), Batches(store, caps))
    try:
        async with stack(*scripts, batches=servicer, **options) as mesh:
            task = asyncio.create_task(make_runner(mesh).run()) if runner else None
            try:
                yield mesh
            finally:
                if task is not None:
                    task.cancel()
                    await asyncio.wait({task})
    finally:
        await store.close()


def make_runner(mesh: Stack, most: int = 8) -> BatchRunner:
    runner = BatchRunner(Jobs(mesh.gateway.mesh), LineFace(mesh.gateway).answer, mesh.gateway.metrics, most=most, timing=QUICK)
    mesh.gateway.wake_runner = runner.wake
    return runner


async def upload(mesh: Stack, content: bytes, name: str = "lines.jsonl", **form: str) -> Any:
    return await mesh.http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"} | form)


async def submit(mesh: Stack, content: bytes, endpoint: str = URL, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """A job of these lines."""
    file = (await upload(mesh, content)).json()
    asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"} | body
    answer = await mesh.http.post("/v1/batches", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def over(mesh: Stack, batch: dict[str, Any], *statuses: str) -> dict[str, Any]:
    """The job once it is in such a state; any that is an end without."""
    found: dict[str, Any] = {}

    async def there() -> bool:
        found.update((await mesh.http.get(f"/v1/batches/{batch['id']}")).json())
        return found["status"] in (statuses or ("completed", "failed", "expired", "cancelled"))

    await until(there, seconds=30)
    return found


async def content(mesh: Stack, file_id: str) -> list[dict[str, Any]]:
    answer = await mesh.http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_job_through_the_http_face(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("hello"))) as mesh:
        batch = await submit(mesh, lines(10, max_tokens=5), metadata={"for": "me"})
        assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"for": "me"})
        done = await over(mesh, batch)
        assert (done["status"], done["request_counts"]) == ("completed", {"total": 10, "completed": 10, "failed": 0})
        assert done["error_file_id"] is None
        assert done["errors"] is None
        results = await content(mesh, done["output_file_id"])
        assert [result["custom_id"] for result in results] == [f"id-{number}" for number in range(10)]
        assert len({result["id"] for result in results}) == 10
        for result in results:
            assert (result["error"], result["response"]["status_code"]) == (None, 200)
            assert result["response"]["body"]["choices"][0]["text"] == "hello"
            assert result["response"]["body"]["service_tier"] == "flex"
            assert result["response"]["request_id"]
        assert {(place.ticket.org, place.ticket.latency_class) for place in mesh.scheduler.places} == {("acme", 3)}
        assert mesh.metric("forebay_batch_lines_total", result="completed") == 10
        assert mesh.metric("forebay_requests_total", face="batch", model="tiny", latency_class="batch", status="OK") == 10


async def test_chats_are_lines_too(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("hi"))) as mesh:
        chat = "/v1/chat/completions"
        body = lines(2, chat, messages=[{"role": "user", "content": "a"}], max_tokens=2).replace(b'"prompt": "a", ', b"")
        done = await over(mesh, await submit(mesh, body, chat))
        results = await content(mesh, done["output_file_id"])
        assert [result["response"]["body"]["choices"][0]["message"]["content"] for result in results] == ["hi", "hi"]


async def test_a_line_that_can_t_be_honoured_is_an_error_of_its_own(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("hello"))) as mesh:
        bad = lines(1, temperature=-1).replace(b"id-0", b"bad") + lines(1, model="none").replace(b"id-0", b"none")
        done = await over(mesh, await submit(mesh, lines(2) + bad))
        assert (done["status"], done["request_counts"]) == ("completed", {"total": 4, "completed": 2, "failed": 2})
        errors = await content(mesh, done["error_file_id"])
        assert [(e["custom_id"], e["response"]["status_code"], e["error"]) for e in errors] == [("bad", 400, None), ("none", 404, None)]
        assert errors[0]["response"]["body"]["error"]["param"] == "temperature"


async def test_lines_that_make_no_sense_fail_the_job_before_any_runs(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("x"))) as mesh:
        failed = await over(mesh, await submit(mesh, lines(2) + b"{\n" + lines(1)))
        assert failed["status"] == "failed"
        assert [(e["code"], e["line"]) for e in failed["errors"]["data"]] == [("invalid_json_line", 3), ("duplicate_custom_id", 4)]
        assert not mesh.scheduler.places


async def test_refusals_for_want_of_room_are_no_results(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("x"))) as mesh:
        mesh.scheduler.refusals.extend(unavailable("full", 0.01, "QUEUE_FULL") for _ in range(30))
        mesh.scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "over", reason="QUOTA_EXCEEDED", retry_after_seconds=0.01))
        done = await over(mesh, await submit(mesh, lines(6)))
        assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert (mesh.metric("forebay_batch_lines_total", result="returned") or 0) > 0


async def test_what_never_fits_the_quota_is_a_result(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("x"))) as mesh:
        mesh.scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "too large", reason="REQUEST_TOO_LARGE"))
        done = await over(mesh, await submit(mesh, lines(1)))
        (error,) = await content(mesh, done["error_file_id"])
        assert error["response"]["status_code"] == 429


async def test_a_line_that_always_fails_on_our_side_is_given_up(redis_server) -> None:
    async def broken(call: Any) -> None:
        await call.accept()
        await call.fail(Code.INTERNAL)

    async with jobs_stack(redis_server.url, broken) as mesh:
        done = await over(mesh, await submit(mesh, lines(1)))
        (error,) = await content(mesh, done["error_file_id"])
        assert (error["response"], error["error"]["code"]) == (None, "attempts_exhausted")
        assert 1 < len(mesh.workers[0].calls) <= 10


async def test_cancelling_ends_what_runs_and_tells_of_what_didn_t(redis_server) -> None:
    async with jobs_stack(redis_server.url, stall(letters("x"))) as mesh:
        batch = await submit(mesh, lines(20))
        await mesh.workers[0].calls.until_length(8)
        cancelling = (await mesh.http.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelling["status"] == "cancelling"
        done = await over(mesh, batch)
        assert (done["status"], done["request_counts"]) == ("cancelled", {"total": 20, "completed": 0, "failed": 20})
        assert {error["error"]["code"] for error in await content(mesh, done["error_file_id"])} == {"batch_cancelled"}
        await mesh.workers[0].cancelled.until_length(8)
        again = await mesh.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_runner_that_leaves_gives_its_lines_back_at_once(redis_server) -> None:
    async with jobs_stack(redis_server.url, stall(), runner=False) as mesh:
        first = asyncio.create_task(make_runner(mesh).run())
        batch = await submit(mesh, lines(4))
        await mesh.workers[0].calls.until_length(4)
        first.cancel()
        await asyncio.wait({first})
        mesh.workers[0].script = play(letters("x"))
        second = asyncio.create_task(make_runner(mesh).run())
        done = await over(mesh, batch)
        assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        second.cancel()
        await asyncio.wait({second})


async def test_what_breaks_in_the_runner_is_counted_and_begins_anew(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("x")), runner=False) as mesh:
        runner = make_runner(mesh)
        lease, failures = runner._jobs.lease, iter([RuntimeError("broken"), RuntimeError("again")])

        async def breaks(most: int) -> Any:
            for failure in failures:
                raise failure
            return await lease(most)

        runner._jobs.lease = breaks  # type: ignore[method-assign]
        task = asyncio.create_task(runner.run())
        done = await over(mesh, await submit(mesh, lines(2)))
        assert done["status"] == "completed"
        assert mesh.metric("forebay_batch_runner_failures_total") == 2
        task.cancel()
        await asyncio.wait({task})


async def test_files_are_listed_described_read_and_deleted(redis_server) -> None:
    async with jobs_stack(redis_server.url, runner=False) as mesh:
        data = lines(2000)
        file = (await upload(mesh, data, "mine.jsonl")).json()
        assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == ("file", len(data), "mine.jsonl", "batch")
        path = f"/v1/files/{file['id']}"
        assert (await mesh.http.get(path)).json() == file
        assert (await mesh.http.get(f"{path}/content")).content == data
        listed = (await mesh.http.get("/v1/files")).json()
        assert (listed["data"], listed["has_more"]) == ([file], False)
        for method, url in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            answer = await mesh.http.request(method, url, headers=OTHER)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_file")
        assert (await mesh.http.get("/v1/files", headers=OTHER)).json()["data"] == []
        assert (await mesh.http.delete(path)).json() == {"id": file["id"], "object": "file", "deleted": True}
        assert (await mesh.http.get(path)).status_code == 404


async def test_jobs_are_their_org_s_alone(redis_server) -> None:
    async with jobs_stack(redis_server.url, runner=False) as mesh:
        batch = await submit(mesh, lines(1))
        for method, url in (("GET", f"/v1/batches/{batch['id']}"), ("POST", f"/v1/batches/{batch['id']}/cancel")):
            answer = await mesh.http.request(method, url, headers=OTHER)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_batch")
        asked = {"input_file_id": batch["input_file_id"], "endpoint": URL}
        assert (await mesh.http.post("/v1/batches", json=asked, headers=OTHER)).status_code == 404
        assert (await mesh.http.get("/v1/batches", headers=OTHER)).json()["data"] == []
        assert [entry["id"] for entry in (await mesh.http.get("/v1/batches")).json()["data"]] == [batch["id"]]
        used = await mesh.http.delete(f"/v1/files/{batch['input_file_id']}")
        assert (used.status_code, used.json()["error"]["code"]) == (400, "file_in_use")


async def test_an_idempotency_key_makes_one_job(redis_server) -> None:
    async with jobs_stack(redis_server.url, runner=False) as mesh:
        file = (await upload(mesh, lines(1))).json()
        asked, key = {"input_file_id": file["id"], "endpoint": URL}, {"idempotency-key": "mine"}
        ids = {(await mesh.http.post("/v1/batches", json=asked, headers=key)).json()["id"] for _ in range(2)}
        assert len(ids) == 1
        other = await mesh.http.post("/v1/batches", json=asked | {"metadata": {"a": "b"}}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_used")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"model": "x"}, "model"),
    ],
)
async def test_what_a_job_can_t_be(body: dict[str, Any], param: str) -> None:
    async with stack() as mesh:
        answer = await mesh.http.post("/v1/batches", json={"input_file_id": "file-a", "endpoint": URL} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


Upload = Callable[[Stack], Awaitable[Any]]


@pytest.mark.parametrize(
    ("send", "status", "code"),
    [
        (lambda mesh: upload(mesh, b"x" * 2000), 413, "file_too_large"),
        (lambda mesh: upload(mesh, b"x", purpose="fine-tune"), 400, "invalid_field"),
        (lambda mesh: upload(mesh, b"x", strange="1"), 400, "invalid_field"),
        (lambda mesh: upload(mesh, b""), 400, "invalid_field"),
        (lambda mesh: upload(mesh, b"\xff"), 400, "invalid_field"),
        (lambda mesh: upload(mesh, b"x", **{"expires_after[anchor]": "now"}), 400, "invalid_field"),
        (lambda mesh: upload(mesh, b"x", purpose="x" * 5000), 400, "invalid_field"),
        (lambda mesh: mesh.http.post("/v1/files", data={"purpose": "batch"}), 415, "unsupported_media_type"),
        (lambda mesh: mesh.http.post("/v1/files", files={"other": b"x"}), 400, "invalid_field"),
        (
            lambda mesh: mesh.http.post("/v1/files", content=b"--b\r\nno", headers={"content-type": "multipart/form-data; boundary=b"}),
            400,
            "invalid_form",
        ),
        (lambda mesh: mesh.http.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400, "invalid_form"),
    ],
)
async def test_an_upload_that_is_refused_leaves_nothing(redis_server, send: Upload, status: int, code: str) -> None:
    async with jobs_stack(redis_server.url, runner=False, caps=Caps(file=1000)) as mesh:
        answer = await send(mesh)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert redis_server.command("DBSIZE") == b":1\r\n", "the schema's version alone"


async def test_a_large_upload_passes_through_in_parts(redis_server) -> None:
    async with jobs_stack(redis_server.url, runner=False) as mesh:
        data = lines(20_000, prompt="x" * 200)
        file = (await upload(mesh, data)).json()
        assert file["bytes"] == len(data) > 5_000_000
        assert (await mesh.http.get(f"/v1/files/{file['id']}/content")).content == data


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=101", "order=asc"])
async def test_lists_refuse_what_they_can_t_do(query: str) -> None:
    async with stack() as mesh:
        for path in ("/v1/files", "/v1/batches"):
            assert (await mesh.http.get(f"{path}?{query}")).status_code == 400


async def _pieces(header: inference_pb2.BatchHeader | None, *data: bytes) -> AsyncIterator[inference_pb2.SubmitBatchRequest]:
    if header is not None:
        yield inference_pb2.SubmitBatchRequest(header=header)
    for piece in data:
        yield inference_pb2.SubmitBatchRequest(lines=piece)


async def _submitted(mesh: Stack, header: inference_pb2.BatchHeader | None, *data: bytes, org: str = "acme") -> batch_pb2.Batch:
    answer = await mesh.inference.SubmitBatch(_pieces(header, *data), metadata=(("authorization", make_token(org)),))
    batch: batch_pb2.Batch = answer.batch
    return batch


async def _read(mesh: Stack, batch_id: str, **fields: Any) -> list[inference_pb2.StreamResultsResponse]:
    request = inference_pb2.StreamResultsRequest(batch_id=batch_id, **fields)
    return [answer async for answer in mesh.inference.StreamResults(request, metadata=(("authorization", make_token()),))]


async def test_a_job_through_the_grpc_face(redis_server) -> None:
    async with jobs_stack(redis_server.url, play(letters("hello"))) as mesh:
        data = lines(9)
        header = inference_pb2.BatchHeader(endpoint=URL, metadata={"a": "b"})
        batch = await _submitted(mesh, header, data[:100], data[100:])
        answers = await _read(mesh, batch.batch_id, follow=True)
        assert [answer.WhichOneof("event") for answer in answers] == ["result"] * 9 + ["batch"]
        assert sorted(answer.result.line for answer in answers[:-1]) == list(range(1, 10))
        end = answers[-1].batch
        assert (end.status, end.num_completed, end.metadata["a"]) == (batch_pb2.BATCH_STATUS_COMPLETED, 9, "b")
        rest = await _read(mesh, batch.batch_id, cursor=answers[6].cursor)
        assert [answer.result for answer in rest[:-1]] == [answer.result for answer in answers[7:-1]]
        user = (("authorization", make_token()),)
        got = await mesh.inference.GetBatch(inference_pb2.GetBatchRequest(batch_id=batch.batch_id), metadata=user)
        assert got.batch == end
        listed = await mesh.inference.ListBatches(inference_pb2.ListBatchesRequest(), metadata=user)
        assert list(listed.batches) == [end]
        file = (await mesh.http.get(f"/v1/files/{batch.input_file_id}/content")).content
        assert file == data


async def test_cancelling_over_grpc(redis_server) -> None:
    async with jobs_stack(redis_server.url, stall()) as mesh:
        batch = await _submitted(mesh, inference_pb2.BatchHeader(endpoint=URL), lines(3))
        await mesh.workers[0].calls.until_length(3)
        request, user = inference_pb2.CancelBatchRequest(batch_id=batch.batch_id), (("authorization", make_token()),)
        assert (await mesh.inference.CancelBatch(request, metadata=user)).batch.status == batch_pb2.BATCH_STATUS_CANCELLING
        answers = await _read(mesh, batch.batch_id, follow=True)
        assert [answer.result.failed for answer in answers[:-1]] == [True] * 3
        assert answers[-1].batch.status == batch_pb2.BATCH_STATUS_CANCELLED


async def test_a_key_makes_one_job_of_two_uploads_and_keeps_one_file(redis_server) -> None:
    async with jobs_stack(redis_server.url, runner=False) as mesh:
        header = inference_pb2.BatchHeader(endpoint=URL, idempotency_key="mine")
        first, again = await _submitted(mesh, header, lines(2)), await _submitted(mesh, header, lines(2))
        assert first == again
        assert len((await mesh.http.get("/v1/files")).json()["data"]) == 1
        assert (await _failure(_submitted(mesh, header, lines(3)))).code is Code.ALREADY_EXISTS


async def _failure(work: Awaitable[Any]) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return from_rpc(caught.value)


async def test_what_the_grpc_face_refuses(redis_server) -> None:
    async with jobs_stack(redis_server.url, runner=False, caps=Caps(file=1000)) as mesh:
        good = inference_pb2.BatchHeader(endpoint=URL)
        for header, data, code, field in (
            (None, [b"x"], Code.INVALID_ARGUMENT, "header"),
            (None, [], Code.INVALID_ARGUMENT, "header"),
            (inference_pb2.BatchHeader(endpoint="/v1/nothing"), [b"x"], Code.INVALID_ARGUMENT, "endpoint"),
            (inference_pb2.BatchHeader(endpoint=URL, window_hours=25), [b"x"], Code.INVALID_ARGUMENT, "completion_window"),
            (inference_pb2.BatchHeader(endpoint=URL, input_file_id="file-x"), [b"x"], Code.INVALID_ARGUMENT, "lines"),
            (good, [], Code.INVALID_ARGUMENT, "file"),
            (inference_pb2.BatchHeader(endpoint=URL, input_file_id="file-x"), [], Code.NOT_FOUND, None),
            (good, [b"x" * 2000], Code.RESOURCE_EXHAUSTED, None),
        ):
            error = await _failure(_submitted(mesh, header, *data))
            assert (error.code, [violation.field for violation in error.violations]) == (code, [field] if field else []), header
        for call in (mesh.inference.SubmitBatch(_pieces(good, b"x")), mesh.inference.GetBatch(inference_pb2.GetBatchRequest())):
            assert (await _failure(call)).code is Code.UNAUTHENTICATED
        batch = await _submitted(mesh, good, lines(1))
        other = (("authorization", make_token("other")),)
        asked = inference_pb2.StreamResultsRequest(batch_id=batch.batch_id)
        assert (await _failure(anext(aiter(mesh.inference.StreamResults(asked, metadata=other))))).code is Code.NOT_FOUND
        assert (await _failure(_read(mesh, batch.batch_id, cursor=-1))).code is Code.INVALID_ARGUMENT
