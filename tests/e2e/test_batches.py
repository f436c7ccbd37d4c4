"""Batch jobs on a real mesh: through the real openai SDK."""

import json

import openai
import pytest

from tests.e2e.mesh import Mesh, wait_until


def lines(num: int, max_tokens: int = 8) -> bytes:
    """A file of so many questions, each with its own answer."""
    entries = [
        {
            "custom_id": f"question-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{number} and {number + 1} are", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
        }
        for number in range(num)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def test_a_job_by_the_sdk(mesh: Mesh) -> None:
    client = mesh.openai()
    file = client.files.create(file=("questions.jsonl", lines(12)), purpose="batch")
    assert client.files.retrieve(file.id).bytes == file.bytes == len(lines(12))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "a test"})
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the job is completed", seconds=90)
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (12, 12, 0)
    assert done.output_file_id is not None
    results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert [result["custom_id"] for result in results] == [f"question-{number}" for number in range(12)]
    assert all(result["response"]["body"]["usage"]["completion_tokens"] == 8 for result in results)
    alone = client.completions.create(model=mesh.model, prompt="3 and 4 are", temperature=0, max_tokens=8, extra_body={"ignore_eos": True})
    assert results[3]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert batch.id in [listed.id for listed in client.batches.list()]
    assert {file.id, done.output_file_id} <= {listed.id for listed in client.files.list()}
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_job_that_is_cancelled_frees_the_workers(mesh: Mesh) -> None:
    client = mesh.openai()
    file = client.files.create(file=("long.jsonl", lines(40, max_tokens=400)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it runs", seconds=60)
    client.batches.cancel(batch.id)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled", "it is cancelled", seconds=60)
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed + counts.failed == counts.total == 40
    mesh.wait_until_idle()
