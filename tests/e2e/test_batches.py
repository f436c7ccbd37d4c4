"""Batch jobs on a real mesh: through the real openai SDK, by commands, and under SIGKILL of every process."""

import json
from pathlib import Path

import openai
import pytest

from bench.batches import Client, run
from tests.e2e.mesh import Mesh, running, wait_until


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


def test_a_job_of_texts_to_embed(mesh: Mesh) -> None:
    client = mesh.openai()
    texts = ["A cat sat on the mat.", "Interest rates rose."]
    entries = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"model": "all-minilm-l6-v2", "input": text}}
        for text in texts
    ]
    file = client.files.create(file=("texts.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the job is completed", seconds=60)
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    results = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    alone = client.embeddings.create(model="all-minilm-l6-v2", input=texts, encoding_format="float")
    for result, text, vector in zip(results, texts, alone.data, strict=True):
        assert result["custom_id"] == text
        assert result["response"]["body"]["data"][0]["embedding"] == pytest.approx(vector.embedding, abs=1e-5)


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


def test_the_commands(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(lines(3))
    done = mesh.forebay("batch", "submit", str(tmp_path / "mine.jsonl"), "--wait")
    assert done.returncode == 0, done.stderr
    batch_id = done.stdout.strip()
    assert "completed: 3 of 3 lines answered" in done.stderr
    results = [json.loads(line) for line in mesh.forebay("batch", "results", batch_id).stdout.splitlines()]
    assert {result["custom_id"] for result in results} == {f"question-{number}" for number in range(3)}
    assert batch_id in mesh.forebay("batch", "status").stdout
    over = mesh.forebay("batch", "cancel", batch_id)
    assert (over.returncode, over.stderr.count("\n")) == (1, 1)
    assert "there is nothing to cancel" in over.stderr


@pytest.mark.timeout(400)
def test_a_job_survives_sigkill_of_each_process(tmp_path: Path) -> None:
    with running(tmp_path / "home", settings={"FOREBAY_BATCH_LINES": "8"}) as mesh:
        client = Client(mesh.grpc_address, mesh.token)
        outcome = run(client, mesh.process.pid, 60, 24, ["gateway", "scheduler", "worker", "valkey"])
        client.close()
        logs = mesh.logs()
    pids = {name.partition("-")[0]: pid for name, pid in mesh.processes.items()}
    assert {name: pid for name, pid, _ in outcome.kills} == pids, "those that were killed are those that were up"
    assert all(0 < done < 60 for _, _, done in outcome.kills)
    assert (outcome.num_lost, outcome.num_doubled, outcome.num_failed, outcome.num_differing) == (0, 0, 0, 0), logs
    assert outcome.batch.num_completed == outcome.batch.num_lines == 60


def test_embeddings_are_lines_too(mesh: Mesh) -> None:
    client = mesh.openai()
    entry = {"method": "POST", "url": "/v1/embeddings", "body": {"model": "all-minilm-l6-v2", "input": "A cat sat on the mat."}}
    content = "".join(json.dumps({"custom_id": f"text-{number}"} | entry) + "\n" for number in range(3)).encode()
    file = client.files.create(file=("texts.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the job is completed", seconds=60)
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    results = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    alone = client.embeddings.create(model="all-minilm-l6-v2", input="A cat sat on the mat.").data[0].embedding
    assert len(results) == 3
    for result in results:
        assert result["response"]["body"]["data"][0]["embedding"] == pytest.approx(alone, abs=1e-5)
